# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The services of the cloud, with the operator's credentials.

They are those of the openstack command: OS_* of the environment, or a cloud of
clouds.yaml that OS_CLOUD names.
"""

from collections.abc import Callable, Iterator
import contextlib

from keystoneauth1 import adapter
from keystoneauth1 import exceptions

from nova_accel import exception

#: service type -> version of its API, default microversion. Placement's is
#: what Nova 31 requires (nova.cmd.status)
_SERVICES = {
    'placement': (None, '1.36'),
    'compute': ('2.1', '2.61'),
    'image': ('2', None),
}
#: what reading the body of an answer raises that another server gave, such as
#: a proxy: no JSON, or another content
NOT_AN_ANSWER = (ValueError, LookupError)


def services() -> Callable[[str], adapter.Adapter]:
    """Read the credentials.

    :returns: gives an adapter for 'placement', 'compute' or 'image'. Its
        requests raise keystoneauth1.exceptions.ClientException, also for
        statuses from 400 on: make them in asking().
    :raises ConfigurationError: there are no usable credentials.
    """
    # takes longer to load than all else together: not for --help
    from openstack import config
    from openstack import exceptions as sdk
    try:
        region = config.get_cloud_region(app_name='nova-accel')
        session = region.get_session()
    except (sdk.ConfigException, exceptions.ClientException) as error:
        raise exception.ConfigurationError(
            f'Credentials were read from the environment (OS_*) and '
            f'clouds.yaml, and they cannot be used '
            f'({_clause(error)}): set OS_CLOUD, or source an openrc file.'
        ) from error

    def service(name: str) -> adapter.Adapter:
        version, microversion = _SERVICES[name]
        return adapter.Adapter(
            session, service_type=name,
            service_name=region.get_service_name(name),
            interface=region.get_interface(name),
            region_name=region.get_region_name(name),
            endpoint_override=region.get_endpoint(name),
            version=version, default_microversion=microversion)
    return service


@contextlib.contextmanager
def asking(service: str, what: str) -> Iterator[None]:
    """Turn an error of a request, or of its body, into one sentence.

    :param service: its name, for the error.
    :param what: was asked for, as a noun.
    :raises ConfigurationError: the credentials are refused, or no endpoint is
        known.
    :raises AcceleratorError: any other error.
    """
    asked = f'{service} was asked for {what}, and'
    try:
        yield
    except (exceptions.Unauthorized, exceptions.Forbidden) as error:
        raise exception.ConfigurationError(
            f'{asked} it refused ({_clause(error)}): use credentials of an '
            f'administrator.') from error
    except exceptions.CatalogException as error:
        raise exception.ConfigurationError(
            f'{asked} its endpoint is not known ({_clause(error)}): correct '
            f'OS_REGION_NAME and OS_INTERFACE, or the catalog.') from error
    except (exceptions.ClientException, *NOT_AN_ANSWER) as error:
        raise exception.AcceleratorError(
            f'{asked} there was no answer ({_clause(error)}): see the log of '
            f'the service and the network between.') from error


def _clause(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip('.') if text else type(error).__name__
