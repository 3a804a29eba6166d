# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Placement, Nova and Glance, with the operator's own credentials.

They are those of the command openstack: OS_* in the environment, or an entry
of clouds.yaml (openstacksdk reads both).
"""

from collections.abc import Iterator
import functools
import typing
from urllib import parse

from glanceclient.v2 import client as glance_client
from keystoneauth1 import adapter
from keystoneauth1 import exceptions as ks_exc
from openstack import config as os_config
from openstack import exceptions as os_exc
import requests

from nova_accel.bitstream import glance
from nova_accel import exception
from nova_accel import text

#: seconds for each answer
_TIMEOUT = 60
#: consumer_type (Placement); extra specs in flavors (Nova)
_VERSIONS = {'placement': '1.38', 'compute': '2.61'}
_NAMES = {'placement': 'Placement', 'compute': 'Nova', 'image': 'Glance'}


def add_arguments(parser) -> None:
    """Give a command the argument --os-cloud."""
    parser.add_argument(
        '--os-cloud', metavar='NAME',
        help='the entry of clouds.yaml with your credentials (default: OS_* '
             'of the environment)')


class Cloud:
    """A cloud as its operator sees it.

    :param name: entry of clouds.yaml; None takes the environment.
    :raises ConfigurationError: there are no usable credentials.
    """

    def __init__(self, name: str | None = None):
        try:
            self._config = os_config.OpenStackConfig().get_one(cloud=name)
            self._session = self._config.get_session()
            self._session.timeout = self._session.timeout or _TIMEOUT
        except (os_exc.SDKException, ks_exc.ClientException, OSError,
                ValueError) as error:
            raise exception.ConfigurationError(
                f'Your credentials were looked for in the environment and in '
                f'clouds.yaml, and they are not complete ({_reason(error)}): '
                f'source your openrc file, or give --os-cloud.') from None

    @property
    def project_id(self) -> str:
        """That of the credentials; '' where they have none."""
        return self._asked('identity', 'the project of your token',
                           self._session.get_project_id) or ''

    def get(self, service: str, path: str, missing: typing.Any = None) -> dict:
        """Return the body of a successful GET.

        :param service: 'placement' or 'compute'.
        :param missing: returned for 404, if given.
        :raises ServiceUnavailable: any other answer, or none.
        """
        return self._asked(
            service, path, lambda: self._adapter(service).get(path).json(),
            missing)

    def images(self) -> glance_client.Client:
        """Return a client of Glance.

        :raises ServiceUnavailable: Keystone does not say where it is.
        """
        endpoint = self._asked(
            'image', 'its endpoint', self._adapter('image').get_endpoint)
        if not endpoint:
            raise _unavailable('image', 'images', 'is not in the catalog')
        return glance_client.Client(
            session=self._session,
            endpoint_override=glance.without_version(endpoint))

    @functools.cache
    def _adapter(self, service):
        return adapter.Adapter(
            self._session, service_type=service,
            interface=self._config.get_interface(service),
            region_name=self._config.get_region_name(service),
            endpoint_override=self._config.get_endpoint(service),
            default_microversion=_VERSIONS.get(service),
            raise_exc=True)

    def _asked(self, service, what, ask, missing=None) -> typing.Any:
        try:
            return ask()
        except ks_exc.NotFound as error:
            if missing is not None:
                return missing
            raise _unavailable(service, what, _reason(error)) from None
        except ks_exc.BadRequest as error:
            raise exception.InvalidRequest(
                f'{_NAMES.get(service, "Keystone")} refuses {what} '
                f'({_detail(error.response)}): correct the request.') from None
        except (ks_exc.ClientException, requests.RequestException, OSError,
                ValueError) as error:
            raise _unavailable(service, what, _reason(error)) from None

    # What a request is made of

    def flavor(self, name_or_id: str) -> dict:
        """Return a flavor, with its extra specs.

        :raises NotThere: there is none.
        """
        found = self.get('compute', f'/flavors/{_quoted(name_or_id)}',
                         missing={})
        if found:
            return found['flavor']
        for flavor in self._pages(
                'compute', '/flavors/detail?is_public=None', 'flavors'):
            if flavor['name'] == name_or_id:
                return flavor
        raise exception.NotThere(
            f'Nova has no flavor with the name or id '
            f'{text.printable(name_or_id)} that your credentials can see: '
            f'compare openstack flavor list --all.')

    def image(self, name_or_id: str) -> dict:
        """Return Glance's record of an image, with its properties.

        :raises NotThere: there is none, or there are several.
        :raises GlanceUnavailable: Glance did not answer.
        """
        found = glance.by_name_or_id(self.images(), name_or_id)
        if len(found) != 1:
            raise exception.NotThere(
                f'Glance has {len(found) or "no"} image'
                f'{"s" * bool(found)} with the name or id '
                f'{text.printable(name_or_id)} that your credentials can see: '
                f'give the id of one.')
        return found[0]

    def server_name(self, uuid: str) -> str | None:
        """Return the name of a server, None where Nova does not know it."""
        server = self.get('compute', f'/servers/{uuid}', missing={})
        return server['server']['name'] if server else None

    def _pages(self, service, path, key) -> Iterator[dict]:
        start = path
        while True:
            found = self.get(service, path)[key]
            yield from found
            if not found:
                return
            path = f'{start}&marker={found[-1]["id"]}'


def query(**fields: str) -> str:
    """Return the query of a URL."""
    return parse.urlencode(fields)


def _quoted(value: str) -> str:
    return parse.quote(value, safe='')


def _unavailable(service, what, why):
    return exception.ServiceUnavailable(
        f'{_NAMES.get(service, "Keystone")} was asked for {what}, and it does '
        f'not answer as it should ({why}): check the service, its endpoint '
        f'and that your credentials are those of an administrator.')


def _detail(response) -> str:
    """Return what Placement or Nova says of a request that it refuses."""
    try:
        error = response.json()
        found = (error['errors'][0]['detail'] if 'errors' in error
                 else next(iter(error.values()))['message'])
    except (ValueError, KeyError, IndexError, AttributeError, TypeError,
            StopIteration):
        found = response.text if response is not None else ''
    return ' '.join(str(found).split())[:300]


def _reason(error) -> str:
    return ' '.join(str(error).split())[:200] or type(error).__name__
