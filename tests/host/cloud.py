# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A cloud around one compute host: the other side of attach.cloud.Cloud.

Its state lies in a file; it outlives a process that is killed, as Placement,
libvirt and Glance outlive nova-compute.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import re
import threading
from urllib import parse
import uuid

from keystoneauth1 import adapter
import os_resource_classes
import os_traits
from oslo_context import context as oslo_context
import requests

from nova_accel.bitstream import glance
from nova_accel import exception
from nova_accel import locks
from nova_accel import model
from nova_accel import request

NODE = 'host'
ROOT = str(uuid.uuid5(uuid.NAMESPACE_DNS, NODE))
PROJECT = 'demo'
#: the project of the operator
OPERATORS = 'admin'


@dataclasses.dataclass
class Server:
    """See attach.cloud.Instance."""

    uuid: str
    project_id: str
    vm_state: str
    task_state: str | None
    metadata: dict
    accelerators: request.Server
    launched: bool


class Unanswered(Exception):
    """libvirt or Nova's database fail: no error of nova_accel."""


class Cloud:
    """One compute host of a cloud. Faults are attributes."""

    def __init__(self, directory: str, kernel):
        """
        :param directory: for the state; the same one, the same cloud.
        :param kernel: of the simulated host.
        """
        self._path = os.path.join(directory, 'cloud.json')
        self._images_path = os.path.join(directory, 'images')
        os.makedirs(self._images_path, exist_ok=True)
        self.kernel = kernel
        self._lock = threading.RLock()
        self._reporting = locks.Lock('reporting', reentrant=True)
        #: what Placement answers instead of allocations: an exception
        self.placement_error = None
        #: raised instead of letting go of, or taking, a device
        self.detach_error = self.attach_error = None
        #: raised instead of reading images with nova-compute's credentials
        self.service_error = None
        #: raised instead of an answer of Nova's API
        self.nova_error = None
        #: name of this host; UUIDs of others with room -> up or down
        self.host, self.hosts = 'host', {}
        #: of a migration that begins; of an accepted one, Nova has no entry yet
        self.first_status = 'migrating'
        #: raised instead of telling which guests there are
        self.libvirt_error = None
        #: how many times Placement was asked for allocations, written to,
        #: asked for names of providers, and Nova which moves are open
        self.asked = self.shown = self.named = self.asked_open = 0
        #: standard ones that Placement knows
        self.traits = frozenset(os_traits.get_traits())
        #: providers of other hosts, as those of the state
        self.other_providers = {}
        #: what a report has seen in a tree, each once
        self._editions = {}

    @contextlib.contextmanager
    def state(self):
        """The state as a dict; what was changed in it is kept."""
        with self._lock, open(f'{self._path}.lock', 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self._text()
            state = json.loads(before)
            yield state
            if json.dumps(state) == before:
                return
            _count(json.loads(before)['providers'], state['providers'])
            with open(f'{self._path}.new', 'w') as file:
                file.write(json.dumps(state))
            os.rename(f'{self._path}.new', self._path)

    def read(self):
        return json.loads(self._text())

    def _text(self):
        """Of the file, which is replaced as a whole."""
        try:
            with open(self._path) as file:
                return file.read()
        except FileNotFoundError:
            return json.dumps({kind: {} for kind in (
                'servers', 'allocations', 'guests', 'providers')})

    # attach.cloud.Cloud

    def admin_context(self):
        return oslo_context.RequestContext(is_admin=True)

    def allocations(self, context, consumer_uuid):
        self.asked += 1
        if self.placement_error:
            raise self.placement_error
        return self.read()['allocations'].get(consumer_uuid, {})

    def reallocate(self, server_uuid, consumer_uuid, resources):
        if self.placement_error:
            raise self.placement_error
        with self.state() as state:
            for provider_uuid, amounts in resources.items():
                for name, amount in amounts.items():
                    item = state['providers'][provider_uuid]['inventory'].get(
                        name, {'total': 0, 'reserved': 0})
                    used = sum(
                        a.get(provider_uuid, {}).get('resources', {}).get(
                            name, 0) for a in state['allocations'].values())
                    if used + amount > item['total'] - item['reserved']:
                        raise exception.PlacementUnavailable('No room.')
                state['allocations'].setdefault(consumer_uuid, {})[
                    provider_uuid] = {'resources': dict(amounts)}

    def consumers(self, provider_uuid):
        if self.placement_error:
            raise self.placement_error
        return {consumer for consumer, allocation
                in self.read()['allocations'].items()
                if provider_uuid in allocation}

    def consumers_of(self, provider_uuids):
        allocations = self.read()['allocations']
        return {uuid_: {consumer: allocations[consumer][uuid_]['resources']
                        for consumer in self.consumers(uuid_)
                        if uuid_ in allocations.get(consumer, ())}
                for uuid_ in provider_uuids}

    def find_providers(self, trait=None, uuid=None, name=None):
        self.named += name is not None
        if self.placement_error:
            raise self.placement_error
        return {
            uuid_ for uuid_, provider in (*self.read()['providers'].items(),
                                          *self.other_providers.items())
            if trait in (None, *provider['traits']) and uuid in (None, uuid_)
            and name in (None, provider.get('name'))}

    def unknown_traits(self, traits):
        if self.placement_error:
            raise self.placement_error
        return {*traits} - self.traits

    def make_trait(self, trait):
        if self.placement_error:
            raise self.placement_error
        with self.state() as state:
            found = state.setdefault('traits', [])
            is_new = trait not in found
            found += [trait] * is_new
        return is_new

    def known_traits(self, prefix):
        if self.placement_error:
            raise self.placement_error
        return {trait for trait in self.read().get('traits', ())
                if trait.startswith(prefix)}

    def remove_trait(self, trait):
        with self.state() as state:
            if trait in state['traits']:
                state['traits'].remove(trait)

    def hosts_for(self, groups, policy):
        assert any('CUSTOM_ACCELERATOR' in name for group in groups.values()
                   for name in group.resources)
        return {*self.hosts}

    # Nova's API

    def ask_nova(self, path, body=None):
        if self.nova_error:
            raise self.nova_error
        _, kind, uuid_, *_ = path.split('/')
        if kind == 'os-hypervisors':
            if self.hosts[uuid_] == 'removed':
                raise exception.NotThere(f'{uuid_} could not be found.')
            return {'hypervisor': {'state': self.hosts[uuid_],
                                   'status': 'enabled'}}
        with self.state() as state:
            server = state['servers'].get(uuid_)
            if server is None:
                raise exception.NotThere(f'{uuid_} could not be found.')
            if body is None:
                return {'server': server}
            rows = state.setdefault('migrations', [])
            if 'confirmResize' in body:
                next(row for row in rows if row['instance_uuid'] == uuid_)[
                    'status'] = 'confirmed'
                server['is_here'] = False
                return {}
            if server.get('task_state'):
                raise exception.InvalidRequest(f'{uuid_} has a task.')
            server['task_state'] = 'migrating'
            rows.append({
                'id': len(rows), 'instance_uuid': uuid_,
                'source_compute': self.host, 'status': self.first_status,
                'migration_type': 'migration' if 'migrate' in body
                else 'live-migration', 'is_own': True})
        return {}

    def migrations(self, since='', server=''):
        if self.nova_error:
            raise self.nova_error
        return [row for row in self.read().get('migrations', ())
                if server in ('', row['instance_uuid'])
                and row['status'] != 'accepted']

    def reporting(self):
        return self._reporting

    def show(self, provider_uuid, change, refused):
        there = self.read()['providers'].get(provider_uuid)
        if there is None:
            return
        inventory, traits = change(there['inventory'], set(there['traits']))
        with self.state() as state:
            there = state['providers'][provider_uuid]
            if inventory is not None:
                there['inventory'] = inventory
            there['traits'] = sorted(traits)
            self.shown += 1

    def configured_classes(self):
        return {}

    def images(self, context):
        if context.user_id is None:
            return self.service_images()
        return Glance(self._images_path, context.project_id)

    def service_images(self):
        if self.service_error:
            raise self.service_error
        return Glance(self._images_path)

    def check_image(self, context, image_id, project_id):
        glance.check_use(self.images(context), image_id, project_id)

    def servers(self, uuids):
        return self._servers(uuids, lambda s: s.get('is_here', True))

    def _servers(self, uuids, matches):
        servers = self.read()['servers']
        return [Server(
            uuid_, s['project_id'], s['vm_state'], s['task_state'],
            s['metadata'], self.server(uuid_), s['launched'])
            for uuid_, s in servers.items()
            if uuid_ in uuids and matches(s)]

    def moves(self, uuids):
        moves = self.read().get('moves', {})
        return {uuid_: moves[uuid_] for uuid_ in uuids if uuid_ in moves}

    def open_moves(self, uuids):
        self.asked_open += 1
        return {move: server for move, server_uuid in self.moves(uuids).items()
                for server in self._servers(
                    [server_uuid], lambda s: s['vm_state'] == 'resized')}

    def is_reverted(self, migration_uuid):
        return migration_uuid in self.read().get('reverted', ())

    def set_metadata(self, instance_uuid, key, text):
        with self.state() as state:
            metadata = state['servers'][instance_uuid]['metadata']
            if text is None:
                metadata.pop(key, None)
            else:
                metadata[key] = text

    def notify(self, event, payload):
        with self.state() as state:
            state.setdefault('notices', []).append([event, dict(payload)])

    def running(self):
        return {uuid_: frozenset(guest['devices'])
                for uuid_, guest in self.read()['guests'].items()
                if guest['running']}

    def guest_devices(self):
        if self.libvirt_error:
            raise self.libvirt_error
        return {uuid_: frozenset(guest['devices'])
                for uuid_, guest in self.read()['guests'].items()}

    def carried(self):
        if self.libvirt_error:
            raise self.libvirt_error
        return {uuid_: guest.get('carried', '')
                for uuid_, guest in self.read()['guests'].items()}

    def carry(self, instance_uuid, text):
        if self.libvirt_error:
            raise self.libvirt_error
        with self.state() as state:
            if instance_uuid in state['guests']:
                state['guests'][instance_uuid]['carried'] = text

    def paused(self, uuids):
        return {uuid_ for uuid_, guest in self.read()['guests'].items()
                if uuid_ in uuids and guest['running']
                and guest.get('paused')}

    def detach(self, instance_uuid, handles):
        if self.detach_error:
            raise self.detach_error
        for address in _addresses(handles):
            with self.state() as state:
                devices = state['guests'][instance_uuid]['devices']
                managed = devices.pop(address, None)
            if managed is not None:
                self._returns(address, managed)

    def attach(self, instance_uuid, handles, lasts=False):
        if self.attach_error:
            raise self.attach_error
        if instance_uuid not in self.running():
            return
        for handle in handles:
            if handle.address not in self.running()[instance_uuid]:
                self._takes([handle], instance_uuid)
                with self.state() as state:
                    state['guests'][instance_uuid]['devices'].update(
                        _addresses([handle]))

    def _takes(self, handles, guest):
        """As libvirt, all functions of a guest that starts at once."""
        managed = [address for handle in handles if _is_managed(handle)
                   for address in handle.addresses]
        if managed:
            self.kernel.guest_takes(*managed, guest=guest)
        for handle in handles:
            if not _is_managed(handle):
                self.kernel.guest_opens(handle.address)

    def _returns(self, address, managed):
        # libvirt logs it when the device is gone
        with contextlib.suppress(OSError):
            if managed:
                self.kernel.guest_returns(address)
            else:
                self.kernel.guest_closes(address)

    # What users and Nova do

    @staticmethod
    def user_context(project):
        """Of a user, with a token."""
        return oslo_context.RequestContext(
            user_id='user', project_id=project, auth_token='token')

    def add_server(self, extra_specs, image_properties=None, uuid_=None,
                   project=PROJECT):
        """A server of that flavor; its uuid."""
        uuid_ = uuid_ or str(uuid.uuid4())
        with self.state() as state:
            state['servers'][uuid_] = {
                'project_id': project, 'vm_state': 'active',
                'task_state': None, 'metadata': {}, 'launched': False,
                'extra_specs': extra_specs,
                'image_properties': image_properties or {}}
        return uuid_

    def server(self, uuid_) -> request.Server:
        server = self.read()['servers'][uuid_]
        return request.Server(uuid_, server['project_id'],
                              server['extra_specs'],
                              server['image_properties'],
                              frozenset(server.get('numa_nodes', ())),
                              tuple(server.get('pci_devices', ())),
                              server.get('flavor', ''))

    def delete_server(self, uuid_):
        """Nova, while this host does not hear of it."""
        with self.state() as state:
            del state['servers'][uuid_]

    def set_server(self, uuid_, **fields):
        with self.state() as state:
            state['servers'][uuid_].update(fields)

    def allocate(self, consumer, allocation):
        """:param allocation: None takes it away, as Nova where a move ends."""
        with self.state() as state:
            if allocation is None:
                state['allocations'].pop(consumer, None)
                self._becomes(
                    state, state.get('moves', {}).get(consumer), 'active')
            else:
                state['allocations'][consumer] = allocation

    @staticmethod
    def _becomes(state, server, vm_state):
        if server in state['servers']:
            state['servers'][server]['vm_state'] = vm_state

    def lose(self, consumer):
        """The operator deletes its allocation."""
        with self.state() as state:
            del state['allocations'][consumer]

    def move_allocation(self, consumer, other):
        with self.state() as state:
            state['allocations'][other] = state['allocations'].pop(consumer)
            if other in state['servers']:
                # the server has its old flavor again before that
                state.setdefault('reverted', []).append(consumer)
                self._becomes(state, other, 'active')
            else:
                state.setdefault('moves', {})[other] = consumer
                self._becomes(state, consumer, 'resized')

    def start_guest(self, uuid_, handles, carried=''):
        """libvirt starts a guest with these devices.

        :param carried: in its metadata.
        """
        self._takes(handles, uuid_)
        with self.state() as state:
            state['guests'][uuid_] = {
                'running': True, 'devices': _addresses(handles),
                'carried': carried}
            if uuid_ in state['servers']:
                state['servers'][uuid_]['launched'] = True

    def stop_guest(self, uuid_, undefine=False):
        with self.state() as state:
            guest = state['guests'].get(uuid_)
            if guest is None:
                return
            devices = guest['devices'] if guest['running'] else {}
            guest['running'] = False
            if undefine:
                del state['guests'][uuid_]
        for address, managed in devices.items():
            self._returns(address, managed)

    def pause_guest(self, uuid_):
        """QEMU pauses a guest because of an error."""
        with self.state() as state:
            state['guests'][uuid_]['paused'] = True

    def lose_power(self):
        """Guests end without being undefined."""
        with self.state() as state:
            for guest in state['guests'].values():
                guest['running'] = False

    def upload(self, data: bytes, **properties) -> str:
        image_id = properties.get('id', str(uuid.uuid4()))
        record = {
            'id': image_id, 'name': 'bitstream', 'status': 'active',
            'size': len(data), 'owner': OPERATORS, 'visibility': 'public',
            'os_hash_algo': 'sha512',
            'os_hash_value': hashlib.sha512(data).hexdigest(), **properties}
        with open(os.path.join(self._images_path, image_id), 'wb') as file:
            file.write(json.dumps(record).encode() + b'\n' + data)
        return image_id

    def change_image(self, image_id, **properties):
        path = os.path.join(self._images_path, image_id)
        with open(path, 'rb') as file:
            record, data = json.loads(file.readline()), file.read()
        with open(path, 'wb') as file:
            file.write(json.dumps({**record, **properties}).encode() + b'\n'
                       + data)

    def delete_image(self, image_id: str) -> None:
        os.unlink(os.path.join(self._images_path, image_id))

    def report(self, parts, starting=False) -> None:
        """One pass of Nova's report of our providers.

        :param starting: the first one, in which Nova moves allocations.
        """
        with self._reporting:
            self._report(parts, starting)
        if starting:
            parts.reshape.end_start()

    def _report(self, parts, starting):
        tree = Tree(self)
        # as virt.provider_trees.below(): the same object
        seen = json.dumps(tree.providers, sort_keys=True)
        if parts.report(tree, NODE, None, starting,
                        self._editions.setdefault(seen, seen)):
            names = {p.get('name') for p in self.other_providers.values()}
            for provider in tree.providers.values():
                if provider['name'] in names:
                    raise AssertionError(
                        f'Placement refuses a second {provider["name"]}')
                _check_names(provider, self.traits)
            with self.state() as state:
                _write(state, tree)
            return
        tree = Tree(self)
        allocations = {
            consumer: {'allocations': allocation} for consumer, allocation
            in self.read()['allocations'].items()}
        parts.report(tree, NODE, allocations)
        self.reshape(tree, allocations)

    def reshape(self, tree, allocations):
        """Placement changes inventories and allocations at once."""
        used: dict = {}
        for given in allocations.values():
            for provider_uuid, allocation in given['allocations'].items():
                for name, amount in allocation['resources'].items():
                    key = provider_uuid, name
                    used[key] = used.get(key, 0) + amount
                    item = tree.providers[provider_uuid]['inventory'][name]
                    if (amount < item['min_unit']
                            or amount % item['step_size']):
                        raise AssertionError(f'Placement refuses {amount} of '
                                             f'{item}')
        for (provider_uuid, name), amount in used.items():
            item = tree.providers[provider_uuid]['inventory'][name]
            if amount > item['total'] - item['reserved']:
                raise AssertionError(f'Placement refuses {item}')
        with self.state() as state:
            _write(state, tree)
            for consumer, given in allocations.items():
                state['allocations'][consumer] = given['allocations']


def _count(before, providers):
    """Placement counts each change of a provider."""
    for uuid_, provider in providers.items():
        old = before.get(uuid_)
        if old and provider != old and (
                provider['generation'] == old['generation']):
            provider['generation'] += 1


def _write(state, tree):
    """Nova writes what differs."""
    there = state['providers']
    state['providers'] = {
        uuid_: {**provider, 'generation': there.get(
            uuid_, provider)['generation']}
        for uuid_, provider in tree.providers.items()}


def _check_names(provider, traits):
    """What Placement answers with 400, and Nova's claim fails with it."""
    if len(provider['name']) > 200:
        raise AssertionError(f'Placement refuses {provider["name"]}')
    for names, known in (
            (provider['traits'], traits),
            (provider['inventory'], os_resource_classes.STANDARDS)):
        for name in names:
            if not (re.fullmatch('CUSTOM_[A-Z0-9_]{1,248}', name)
                    or name in known):
                raise AssertionError(f'Placement refuses {name}')
    for item in provider['inventory'].values():
        if not (type(item['total']) is int and 0 < item['total'] < 1 << 31):
            raise AssertionError(f'Placement refuses {item}')


def _addresses(handles) -> dict[str, bool]:
    """Hostdevs of a guest -> whether libvirt binds them to VFIO and back."""
    return {address: _is_managed(handle) for handle in handles
            for address in (handle.address, *handle.companions)}


def _is_managed(handle) -> bool:
    return handle.type is model.HandleType.PCI and handle.managed


#: of a Glance that is out of service
BUSY = 503, {'error': {'message': 'It is busy.'}}


class Glance:
    """As much of a glanceclient as bitstream.glance uses, and of Glance."""

    def __init__(self, directory, project=None):
        """:param project: of the user; None for one who sees everything."""
        self._directory, self._project = directory, project
        self.http_client = adapter.Adapter(
            self, endpoint_override='http://glance')

    def request(self, url, method, **kwargs):
        """As keystoneauth1.session.Session.request()."""
        status, content = self.answer(url)
        answer = requests.Response()
        answer.status_code = status
        is_data = isinstance(content, bytes)
        answer.headers['Content-Type'] = (
            'application/octet-stream' if is_data else 'application/json')
        answer.raw = io.BytesIO(
            content if is_data else json.dumps(content).encode())
        return answer

    def answer(self, url):
        """Return a status, and data or what becomes JSON."""
        path, _, query = url.partition('?')
        parts = path.removeprefix('/v2/images').strip('/').split('/')
        if not parts[0]:
            wanted = dict(parse.parse_qsl(query))
            return 200, {'images': [
                record for record in map(self._record, self._names())
                if wanted.items() <= record.items()
                and self._sees(record)]}
        if parts[0] not in self._names() or not self._sees(
                self._record(parts[0])):
            return 404, {}
        if parts[1:] == ['file']:
            return 200, self._read(parts[0])[1]
        if parts[1:] == ['members']:
            return 200, {'members': [
                {'member_id': member, 'status': status} for member, status
                in self._record(parts[0]).get('members', {}).items()]}
        return 200, self._record(parts[0])

    def _sees(self, record):
        return (self._project in (None, record['owner'])
                or record['visibility'] in ('public', 'community')
                or self._project in record.get('members', ()))

    def _names(self):
        return os.listdir(self._directory)

    def _record(self, name):
        return json.loads(self._read(name)[0])

    def _read(self, name):
        with open(os.path.join(self._directory, name), 'rb') as file:
            return file.readline(), file.read()


class Data:
    """As nova.compute.provider_tree.ProviderData."""

    def __init__(self, uuid_, name, parent_uuid, inventory, traits,
                 generation):
        self.uuid, self.name, self.parent_uuid = uuid_, name, parent_uuid
        self.inventory, self.traits = inventory, set(traits)
        self.generation = generation


class Tree:
    """As much of nova.compute.provider_tree.ProviderTree as we use."""

    def __init__(self, cloud):
        self.providers = {
            ROOT: {'name': NODE, 'parent': None, 'inventory': {},
                   'traits': [], 'generation': 0}, **cloud.read()['providers']}

    def _uuid(self, name):
        if name in self.providers:
            return name
        for uuid_, provider in self.providers.items():
            if provider['name'] == name:
                return uuid_
        raise ValueError(f'No such provider {name}')

    def exists(self, name):
        try:
            return bool(self._uuid(name))
        except ValueError:
            return False

    def data(self, name):
        uuid_ = self._uuid(name)
        p = self.providers[uuid_]
        return Data(uuid_, p['name'], p['parent'],
                    json.loads(json.dumps(p['inventory'])), p['traits'],
                    p['generation'])

    def get_provider_uuids(self, name=None):
        if name is None:
            return list(self.providers)
        found = [self._uuid(name)]
        for uuid_, provider in self.providers.items():
            if provider['parent'] in found:
                found.append(uuid_)
        return found

    def new_child(self, name, parent, uuid=None, **kwargs):
        self.providers[uuid] = {
            'name': name, 'parent': self._uuid(parent), 'inventory': {},
            'traits': [], 'generation': 0}
        return uuid

    def remove(self, name):
        del self.providers[self._uuid(name)]

    def update_inventory(self, name, inventory):
        self.providers[self._uuid(name)]['inventory'] = inventory

    def update_traits(self, name, traits):
        self.providers[self._uuid(name)]['traits'] = sorted(traits)

    def add_traits(self, name, *traits):
        self.update_traits(name, self.data(name).traits | set(traits))

    def remove_traits(self, name, *traits):
        self.update_traits(name, self.data(name).traits - set(traits))
