# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The OpenStack services, asked with the credentials of the operator."""

from keystoneauth1 import adapter as keystone_adapter
from keystoneauth1 import exceptions as keystone
from openstack import config
from openstack import exceptions as openstack

from nova_accel import exception


def adapter(service: str) -> keystone_adapter.Adapter:
    """Return an adapter of a service, by the type of the service.

    The credentials are those of the environment (OS_...) or of clouds.yaml.

    :param service: placement, compute or image.
    :raises ConfigurationError: there are no credentials, or not all.
    """
    try:
        region = config.get_cloud_region()
        return keystone_adapter.Adapter(
            region.get_session(), service_type=service,
            interface=region.get_interface(service),
            region_name=region.get_region_name(service),
            endpoint_override=region.get_endpoint(service))
    except (openstack.ConfigException, keystone.ClientException) as error:
        raise exception.ConfigurationError(
            f'The service {service} has to be asked, and there are no '
            f'credentials for it ({" ".join(str(error).split())}): set the '
            f'variables OS_... by an openrc file, or OS_CLOUD to a cloud of '
            f'clouds.yaml.') from error
