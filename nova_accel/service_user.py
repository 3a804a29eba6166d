# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova's API with the credentials of [service_user]."""

from keystoneauth1 import adapter as ks_adapter
from keystoneauth1 import loading as ks_loading

from nova_accel import conf

CONF = conf.CONF


def nova(microversion: str) -> ks_adapter.Adapter | None:
    """Return a client of Nova's API, or None without credentials.

    Nova has no section of options for its own endpoint. Hence region and
    interface of [placement] are used.

    :raises keystoneauth1.exceptions.ClientException: the options are invalid.
    """
    auth = ks_loading.load_auth_from_conf_options(CONF, 'service_user')
    if auth is None:
        return None
    return ks_adapter.Adapter(
        ks_loading.load_session_from_conf_options(CONF, 'service_user'),
        auth=auth, service_type='compute',
        region_name=CONF.placement.region_name,
        interface=CONF.placement.valid_interfaces,
        default_microversion=microversion)
