# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Implement attach.cloud.Cloud by Nova, and by the services that Nova uses.

attach.cloud.Cloud describes each call. On the compute side, this module has
all uses of private parts of Nova. tests/unit/test_nova_signatures.py compares
these parts between releases.
"""

from collections.abc import Callable
import contextlib
import functools
import json
import operator
from urllib import parse

from keystoneauth1 import exceptions as ks_exc
from nova.compute import resource_tracker
from nova import context as nova_context
from nova import exception as nova_exception
from nova.image import glance as nova_glance
from nova import objects
from nova import rpc
from oslo_concurrency import lockutils

from nova_accel.bitstream import glance
from nova_accel import exception
from nova_accel import log as logging
from nova_accel import request
from nova_accel.scheduler import candidates
from nova_accel import service_user
from nova_accel.virt import consumers
from nova_accel.virt import guest as guest_xml

LOG = logging.getLogger(__name__)
#: seconds for each answer of Nova's API
_NOVA_SECONDS = 60
#: candidates of Placement that are read to find a host with room
_MOST_CANDIDATES = 1000
#: maximum number of tries of a write that other clients interfere with
_TRIES = 5
#: states of migrations whose servers may get their earlier devices back. A
#: confirm that has begun is not reverted: if it fails, Nova deletes the
#: allocation before it writes 'error'. The destination of a revert writes
#: 'reverted' before the source has begun.
_OPEN = ('migrating', 'post-migrating', 'finished', 'reverting', 'reverted')
#: fields of Nova's entry of a server that NovaServer reads
_READ = ['metadata', 'flavor', 'system_metadata']
_GENERATION = operator.itemgetter('resource_provider_generation')


class NovaCloud:
    """The interface to Nova, Placement, Glance and libvirt; see
    attach.cloud.Cloud."""

    def __init__(self, driver, by_iommufd: Callable[..., set[str]]
                 = lambda *_: set()):
        """
        :param driver: nova.virt.libvirt.driver.LibvirtDriver
        :param by_iommufd: LiveMigrations.by_iommufd().
        """
        self._driver = driver
        self._by_iommufd = by_iommufd
        #: devices in guest XML and in running guests
        self.hostdevs = guest_xml.Hostdevs(driver._set_managed_mode)
        self._consumers = consumers.Consumers(
            lambda url, version: self._listed(self._get(url, version)),
            self._allocations_of, self._copy_of)

    def admin_context(self):
        return nova_context.get_admin_context()

    # Placement

    @property
    def _placement(self):
        """Return Nova's report client."""
        return self._driver.virtapi.reportclient

    def allocations(self, context, consumer_uuid):
        try:
            return _checked(self._placement.get_allocs_for_consumer(
                context, consumer_uuid)['allocations'])
        except (nova_exception.ConsumerAllocationRetrievalFailed,
                ks_exc.ClientException, *exception.MALFORMED) as error:
            # the error of keystoneauth contains the address
            asked = (f'Placement was asked for the allocations of '
                     f'{consumer_uuid}, and did not return them')
            raise exception.PlacementUnavailable(
                f'{asked} ({_short(error)}): check that it answers '
                f'nova-compute, and try again.', found=asked) from error

    def reallocate(self, server_uuid, consumer_uuid, resources):
        context, client = self.admin_context(), self._placement
        try:
            instance = objects.Instance.get_by_uuid(context, server_uuid)
            found = {'project_id': instance.project_id,
                     'user_id': instance.user_id, 'consumer_generation': None,
                     **client.get_allocs_for_consumer(context, consumer_uuid)}
            for provider_uuid, amounts in resources.items():
                found['allocations'].setdefault(
                    provider_uuid, {'resources': {}})['resources'].update(
                        amounts)
            if client.put_allocations(context, consumer_uuid, found):
                return
            reason = 'it refused, see its log'
        except (nova_exception.NovaException, ks_exc.ClientException,
                *exception.MALFORMED) as error:
            reason = _short(error)
        raise exception.PlacementUnavailable(
            f'The accelerators of server {server_uuid} had to be allocated '
            f'again, and Placement has not done so ({reason}): it is tried '
            f'again.')

    def consumers(self, provider_uuid):
        return {*self._allocations_of(provider_uuid)}

    def consumers_of(self, provider_uuids):
        return self._consumers.of(provider_uuids)

    def _allocations_of(self, provider_uuid):
        try:
            return _checked(
                self._placement.get_allocations_for_resource_provider(
                    self.admin_context(), provider_uuid).allocations)
        except (nova_exception.ResourceProviderAllocationRetrievalFailed,
                ks_exc.ClientException, *exception.MALFORMED) as error:
            if _is_absent(error):
                # Placement does not remove an allocated provider
                return {}
            raise exception.PlacementUnavailable(
                f'Placement was asked for the allocations of provider '
                f'{provider_uuid}, and did not return them '
                f'({_short(error)}): check that it answers nova-compute.'
            ) from error

    def _copy_of(self, provider_uuid):
        """Return the generation and inventory of a provider in Nova's copy, or
        None if the copy lacks the provider."""
        try:
            data = self._placement._provider_tree.data(provider_uuid)
        except ValueError:
            return None
        return data.generation, data.inventory

    def _get(self, url, version):
        return self._send(self._placement.get, url, version=version)

    @staticmethod
    def _send(send, url, *args, **kwargs):
        """Return the answer of Placement, or None if Nova's client got none.

        :raises PlacementUnavailable: the client raised an error.
        """
        try:
            return send(url, *args, **kwargs)
        except ks_exc.ClientException as error:
            raise exception.PlacementUnavailable(
                f'Placement was asked for {url}, and did not answer '
                f'({_short(error)}): check that it answers nova-compute.',
                found=f'Placement was asked for {url}, and did not answer'
            ) from error

    def find_providers(self, trait=None, uuid=None, name=None):
        query = {'required': trait, 'uuid': uuid, 'name': name}
        url = '/resource_providers?' + parse.urlencode(
            {key: value for key, value in query.items() if value})
        # 1.18: required
        response = self._get(url, '1.18')
        if (response is not None and response.status_code == 400
                and 'Invalid trait' in response.text):
            # the trait does not exist, so no provider has it
            return set()
        return {*self._listed(response)}

    def unknown_traits(self, traits):
        return {*traits} - self._traits('in:' + ','.join(traits))

    def _traits(self, name):
        # 1.6: traits
        return self._answer(self._get(f'/traits?name={name}', '1.6'),
                            lambda body: set(body['traits']))

    def make_trait(self, trait):
        # 1.6: custom traits
        response = self._send(
            self._placement.put, f'/traits/{trait}', {}, version='1.6')
        if response is None or response.status_code not in (201, 204):
            self._answer(response)
        return response.status_code == 201

    def known_traits(self, prefix):
        return self._traits(f'startswith:{prefix}')

    def remove_trait(self, trait):
        self._send(self._placement.delete, f'/traits/{trait}', version='1.6')

    def hosts_for(self, groups, policy):
        return self._answer(
            self._get(candidates.url(
                groups, _MOST_CANDIDATES, policy=policy,
                root_forbidden=['COMPUTE_STATUS_DISABLED']), '1.36'),
            lambda body: {
                provider['root_provider_uuid'] for provider
                in body['provider_summaries'].values()})

    def reporting(self):
        # a report in progress would overwrite the change with its earlier
        # copy; this is the lock of nova.utils.synchronized, which is for
        # functions only
        return lockutils.lock(
            resource_tracker.COMPUTE_RESOURCE_SEMAPHORE, fair=True)

    def show(self, provider_uuid, change, refused):
        context, client = self.admin_context(), self._placement
        url = f'/resource_providers/{provider_uuid}'
        for _ in range(_TRIES):
            found_at, inventories = self._answer(
                client.get(f'{url}/inventories', version='1.26'),
                lambda body: (_GENERATION(body), dict(body['inventories'])))
            generation, shown = self._answer(
                client.get(f'{url}/traits', version='1.6'),
                lambda body: (_GENERATION(body), set(body['traits'])))
            if generation != found_at:
                # another writer came between the read and the write
                continue
            inventory, traits = change(inventories, shown)
            if inventory is not None:
                # Placement may lack the class of an operator's own type
                client._ensure_resource_classes(
                    context, inventory.keys() - inventories.keys())
                generation = self._put(
                    f'{url}/inventories', '1.26', generation, 'inventories',
                    inventory, client._provider_tree.update_inventory,
                    provider_uuid, refused)
            if generation is not None and traits != shown:
                client._ensure_traits(context, traits - shown)
                generation = self._put(
                    f'{url}/traits', '1.6', generation, 'traits',
                    sorted(traits), client._provider_tree.update_traits,
                    provider_uuid)
            if generation is not None:
                return
        raise exception.PlacementUnavailable(
            f'Provider {provider_uuid} had to be shown in Placement, and '
            f'others changed it {_TRIES} times meanwhile: the next report '
            f'shows it.')

    def configured_classes(self):
        manager = getattr(self._driver.virtapi, '_compute', None)
        configs = getattr(getattr(manager, 'rt', None), 'provider_configs', {})
        return {key: set().union(*config.get('inventories', {}).get(
            'additional', ())) for key, config in configs.items()}

    def _put(self, url, version, generation, name, value, remember,
             provider_uuid, refused=lambda: None):
        """Write a part of a provider to Placement and into Nova's copy.

        The methods of the report client are not used, because they log an
        ERROR if a server was scheduled to the provider at this moment.

        :param refused: called if Placement refuses the request.
        :returns: the new generation, or None if another client changed the
            provider first.
        """
        response = self._placement.put(
            url, {'resource_provider_generation': generation, name: value},
            version=version)
        # after another answer, or none, the part may have been written
        if response is not None and 400 <= response.status_code < 500:
            refused()
        if response is not None and _is_too_late(response):
            return None
        generation = self._answer(response, _GENERATION)
        with contextlib.suppress(ValueError):
            # Nova has not read the provider yet
            remember(provider_uuid, value, generation=generation)
        return generation

    @staticmethod
    def _answer(response, read=dict):
        """Return the JSON of an answer of Placement, converted by read().

        :raises PlacementUnavailable: the status is not 200, or no answer came.
        """
        if response is not None and response.status_code == 200:
            with contextlib.suppress(*exception.MALFORMED):
                return read(response.json())
        said = ('no answer' if response is None
                else f'{response.status_code} {response.text[:200]}')
        raise exception.PlacementUnavailable(
            f'Placement was asked for a provider of this host, and gave '
            f'{said}: check that it answers nova-compute.')

    @classmethod
    def _listed(cls, response):
        return cls._answer(response, lambda body: {
            provider['uuid']: provider['generation']
            for provider in body['resource_providers']})

    # Glance

    def images(self, context):
        if context.user_id:
            return nova_glance.GlanceClientWrapper(
                context,
                endpoint=nova_glance.generate_glance_url(context)).client
        # programming at run time and at host boot has no user
        return self.service_images()

    def service_images(self):
        return glance.service_client()

    def check_image(self, context, image_id, project_id):
        glance.check_use(self.images(context), image_id, project_id)

    # Nova's API

    @property
    def host(self):
        return self._driver.virtapi._compute.host

    @functools.cached_property
    def _nova(self):
        # 2.80: the user of a migration
        found = service_user.nova('2.80')
        if found is None:
            raise exception.InvalidRequest(
                '[accel] heal needs the credentials of [service_user], and '
                'nova.conf of this host has none: set them.')
        return found

    def ask_nova(self, path, body=None):
        def ask(nova):
            answer = (nova.get(path, timeout=_NOVA_SECONDS) if body is None
                      else nova.post(path, json=body, timeout=_NOVA_SECONDS))
            return answer.json() if answer.content else {}
        return self._asked(path, ask)

    def _asked(self, what, ask):
        asked = f'Nova was asked for {what}, and'
        try:
            return ask(self._nova)
        except ks_exc.NotFound as error:
            raise exception.NotThere(
                f'{asked} has not found it ({_short(error)}).') from error
        except ks_exc.HTTPClientError as error:
            raise exception.InvalidRequest(
                f'{asked} refused ({_short(error)}): compare the roles of the '
                f'user of [service_user].') from error
        except (ks_exc.ClientException, *exception.MALFORMED) as error:
            raise exception.ServiceUnavailable(
                f'{asked} did not answer ({_short(error)}): see that it '
                f'answers nova-compute.') from error

    def migrations(self, since='', server=''):
        user = self._asked('migrations', lambda nova: nova.get_user_id())
        found = self.ask_nova('/os-migrations?' + parse.urlencode(
            {'instance_uuid': server} if server else
            {'user_id': user, 'changes-since': since}))
        return [{**row, 'is_own': row['user_id'] == user}
                for row in found['migrations']]

    # Servers

    def servers(self, uuids):
        instances = objects.InstanceList.get_by_filters(
            self.admin_context(),
            {'uuid': list(uuids), 'deleted': False, 'host': self.host},
            expected_attrs=_READ, use_slave=False)
        return [NovaServer(instance) for instance in instances]

    def moves(self, uuids):
        return {uuid: migration.instance_uuid for uuid in uuids
                if (migration := self._migration(uuid))}

    def open_moves(self, uuids):
        found = {}
        for uuid in uuids:
            migration = self._migration(uuid)
            if migration is None or migration.status not in _OPEN:
                continue
            with contextlib.suppress(nova_exception.InstanceNotFound):
                instance = objects.Instance.get_by_uuid(
                    self.admin_context(), migration.instance_uuid,
                    expected_attrs=_READ)
                # the status may be unchanged if an operator has reset the
                # state of the server
                if instance.vm_state == 'resized' or instance.task_state:
                    instance.flavor = instance.old_flavor or instance.flavor
                    found[uuid] = NovaServer(instance)
        return found

    def is_reverted(self, migration_uuid):
        # The flavor shows a revert before Placement does
        # (_finish_revert_resize of nova.compute.manager). The status does not:
        # it is 'error' after a failed confirm as after a failed revert. No
        # later resize has restored the old flavor, because the rest of a move
        # ends before another begins.
        migration = self._migration(migration_uuid)
        return (migration is not None
                and migration.status not in ('confirming', 'confirmed')
                and migration.old_instance_type_id
                == objects.Instance.get_by_uuid(
                    self.admin_context(),
                    migration.instance_uuid).instance_type_id)

    def is_latest_move(self, migration_uuid):
        migration = self._migration(migration_uuid)
        return migration is not None and all(
            other.id <= migration.id
            for other in objects.MigrationList.get_by_filters(
                self.admin_context(),
                {'instance_uuid': migration.instance_uuid}))

    def _migration(self, uuid):
        with contextlib.suppress(nova_exception.MigrationNotFound):
            return objects.Migration.get_by_uuid(self.admin_context(), uuid)
        return None

    def set_metadata(self, instance_uuid, key, text):
        context = self.admin_context()
        if text is None:
            # touches no other key
            objects.Instance.get_by_uuid(
                context, instance_uuid, expected_attrs=['metadata'],
            ).delete_metadata_key(key)
            return
        self._write_metadata(context, instance_uuid, {key: text})

    @staticmethod
    def _write_metadata(context, instance_uuid, changes):
        for _ in range(_TRIES):
            # Read at the last moment: a save writes all keys and removes the
            # others (_instance_metadata_update_in_place of nova.db.main.api),
            # and what nova-conductor offers compares none. What an owner
            # writes between the two is lost, as between two of their own
            # requests; docs/source/tenants.rst states it.
            instance = objects.Instance.get_by_uuid(
                context, instance_uuid, expected_attrs=['metadata'])
            instance.metadata = _changed(instance.metadata, changes)
            instance.save()
            instance.refresh()
            if _changed(instance.metadata, changes) == instance.metadata:
                return

    def notify(self, event, payload):
        # rpc.get_notifier() warns of events that are not Nova's
        rpc.LEGACY_NOTIFIER.prepare(publisher_id=f'compute.{self.host}').info(
            self.admin_context(), event, {'host': self.host, **payload})

    def change_metadata(self, instance, changes):
        """Change the metadata of a server in the database and in ``instance``,
        because Nova creates the config drive from ``instance``.

        No change by the owner is lost, because Nova refuses such changes
        meanwhile (check_instance_state of
        nova.compute.api.API.update_instance_metadata).

        :param instance: nova.objects.Instance
        :param changes: key -> text; None removes a key.
        """
        if not changes:
            return
        try:
            self._write_metadata(
                self.admin_context(), instance.uuid, changes)
            instance.metadata = _changed(instance.metadata, changes)
            # it is written, and must not be written again by Nova's next save
            instance.obj_reset_changes(['metadata'])
        except Exception as error:
            LOG.warning('The metadata of server %s does not show %s (%s): '
                        'hard reboot it.', instance.uuid, changes, error)

    # Guests

    def running(self):
        return self.guest_devices(only_running=True)

    def guest_devices(self, only_running=False):
        return {guest.uuid: frozenset(self.hostdevs.addresses(guest))
                for guest in self._driver._host.list_guests(
                    only_running=only_running)}

    def carried(self):
        return {guest.uuid: guest_xml.read_claims(xml)
                for guest in self._driver._host.list_guests(only_running=False)
                if (xml := guest_xml.xml_of(guest))}

    def carry(self, instance_uuid, text):
        with contextlib.suppress(nova_exception.InstanceNotFound):
            guest_xml.write_claims(self._guest(instance_uuid), text)

    def paused(self, uuids):
        return {guest.uuid for guest in (self._driver._host.list_guests(
                    only_running=True) if uuids else ())
                if guest.uuid in uuids and guest_xml.is_paused(guest)}

    def detach(self, instance_uuid, handles):
        self.hostdevs.detach(self._guest(instance_uuid), handles)

    def attach(self, instance_uuid, handles, lasts=False):
        # a guest that was shut down meanwhile gets the devices when it starts
        with contextlib.suppress(nova_exception.InstanceNotFound):
            guest = self._guest(instance_uuid)
            if guest.is_active():
                self.hostdevs.attach(
                    guest, handles, lasts, self._by_iommufd(
                        instance_uuid, lambda: objects.Instance.get_by_uuid(
                            self.admin_context(), instance_uuid,
                            expected_attrs=['flavor', 'system_metadata'])))
                self._describe(instance_uuid)

    def without_iommufd(self, instance_uuid, addresses):
        return guest_xml.without_iommufd(
            self._guest(instance_uuid).get_xml_desc(), addresses)

    def _describe(self, instance_uuid):
        context = self.admin_context()
        try:
            instance = objects.Instance.get_by_uuid(
                context, instance_uuid, expected_attrs=['device_metadata'])
            instance.device_metadata = self._driver._build_device_metadata(
                context, instance)
            instance.save()
        except Exception as error:
            LOG.warning('The device metadata of server %s could not be '
                        'updated (%s): hard reboot it to update them.',
                        instance_uuid, error)

    def _guest(self, instance_uuid):
        return self._driver._host.get_guest(
            objects.Instance(uuid=instance_uuid))


class NovaServer:
    """A server in Nova; see attach.cloud.Instance."""

    def __init__(self, instance):
        """:param instance: nova.objects.Instance"""
        self.uuid = instance.uuid
        self.project_id = instance.project_id
        self.vm_state = instance.vm_state
        self.task_state = instance.task_state
        self.launched = instance.launched_at is not None
        self.metadata = instance.metadata
        self.accelerators = server_of(instance)


def server_of(instance) -> request.Server:
    """Return the facts about accelerators in Nova's entry of a server.

    :param instance: nova.objects.Instance
    """
    # a flavor that is not loaded is not fetched: Nova always loads it
    specs = instance.flavor.extra_specs if 'flavor' in instance else {}
    if request.is_plain(specs):
        # other fields that Nova may not have loaded are not read either
        return request.Server(instance.uuid, '', {})
    return request.Server(
        instance.uuid, instance.project_id, specs,
        {key.removeprefix('image_'): value
         # Nova's thread for the network may write into it meanwhile
         for key, value in dict(instance.system_metadata).items()
         if key.startswith('image_accel')},
        # Nova's claim has replaced a cell's id by the id of the host's cell
        # (nova.virt.hardware.numa_fit_instance_to_host)
        frozenset(cell.id for cell in _loaded(
            instance, 'numa_topology', 'cells')),
        tuple(device.address for device in _loaded(
            instance, 'pci_devices', 'objects')),
        instance.flavor.flavorid)


def _loaded(instance, field, items):
    """Return the list in a field of Nova's entry of a server, or () if Nova
    has not loaded the field."""
    found = getattr(instance, field) if field in instance else None
    return getattr(found, items) if found else ()


def _changed(metadata, changes):
    return {key: text for key, text in {**metadata, **changes}.items()
            if text is not None}


def _checked(allocations):
    """Return allocations after checking their structure.

    :raises: one of exception.MALFORMED: the answer is not Placement's.
    """
    for given in allocations.values():
        given['resources'].items()
    return allocations


def migration_of(context, instance):
    """Return the present move of a server; for use on the source of the move.

    :returns: nova.objects.Migration
    """
    if instance.migration_context is not None:
        return objects.Migration.get_by_id_and_instance(
            context, instance.migration_context.migration_id, instance.uuid)
    # a resize to another cell
    return objects.Migration.get_by_instance_and_status(
        context, instance.uuid, 'migrating')


def _short(error) -> str:
    return str(error).partition('\n')[0][:120]


def _is_too_late(response) -> bool:
    """Return whether another client changed a provider first.

    Placement checks the generation twice, and the second check of a PUT of
    traits ends with status 500 (placement/handlers/trait.py does not catch the
    error).
    """
    return response.status_code == 409 or (
        response.status_code == 500 and 'concurrently' in response.text)


def _is_absent(error: Exception) -> bool:
    """Return whether Placement answered that it has no such provider.

    Only the given error is read. A second request to Placement could find the
    provider, because a report of nova-compute may create it meanwhile.

    :param error: from get_allocations_for_resource_provider(). It contains the
        answer (JSON of the API working group).
    """
    try:
        answer = json.loads(error.kwargs['error'])  # type: ignore
        return [item['status'] for item in answer['errors']] == [404]
    except exception.MALFORMED:
        return False
