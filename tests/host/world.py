# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The host of tests.host.explorer, and what always holds there.

A world has a simulated host with FPGAs, disks and vGPUs, the small cloud of
tests.host.cloud, and nova-compute in a process of its own (tests.host.killed),
which is killed in the middle of events. Each event is judged by what the cloud,
the kernel and the claim store have, not by what nova-compute says:

* no device is in two guests, and each guest has claims of its devices;
* no server reads what another one wrote, and none loses what it wrote;
* once nova-compute has had time, the claims, the metadata of the guests and
  Placement agree, and nothing is withheld without a reason;
* after the last server nothing is claimed, withheld or reserved, and Placement
  shows what it showed at the start.
"""

import collections
import contextlib
import dataclasses
import os
import re
import uuid

import fixtures

from nova_accel.attach import carrying
from nova_accel import model
from nova_accel.store import claim_store
from tests.host import base
from tests.host import cloud as clouds
from tests.host import killed
from tests.unit import host as simulated
from tests.unit import vgpus
from tests.unit.host import A, B, FUNCTION, OTHER, plain, vf

DISKS = '0000:02:00.0', '0000:03:00.0'
#: cards that change places
EXCHANGED = DISKS, (A, B)
SSD, VGPU = 'CUSTOM_ACCELERATOR_SSD', 'CUSTOM_ACCELERATOR_VGPU'
#: of a project's own image, and of the clearing one
OWN = 'dddddddd-0000-4000-8000-000000000000'
BLANK = 'cccccccc-0000-4000-8000-000000000000'
CLEARS = {'accel:clears': 'registers',
          'accel:region_type_id': simulated.INTERFACE}


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a server asks for."""
    resource_class: str
    specs: dict
    #: that its region carries
    function: str | None = None
    #: whether its image names a bitstream of its project
    own: bool = False


FPGA = Kind(base.FPGA, base.asks(runtime_programming='true'))
KINDS = (
    Kind(SSD, {f'resources1:{SSD}': '1', 'accel:live_migration': 'detach'}),
    FPGA,
    Kind(base.FPGA, base.asks(FUNCTION), FUNCTION),
    Kind(base.FPGA, base.asks(OTHER), OTHER),
    dataclasses.replace(FPGA, own=True),
    Kind(VGPU, {f'resources1:{VGPU}': '1', 'accel:live_migration': 'detach'}),
)


@dataclasses.dataclass
class Server:
    uuid: str
    kind: Kind
    #: active, off, moved, away, coming, forgotten; broken (can be started),
    #: stuck (in a resize), deleting, confirming or reverting: nova-compute was
    #: killed in the middle of it
    state: str = 'active'
    migration: str = ''
    #: serial numbers of the disks that it had before a move
    kept: tuple[str, ...] = ()
    #: whether it moved on this host
    here: bool = False

    @property
    def consumers(self) -> list[str]:
        """Placement's, which may have something here."""
        return [self.uuid] + [self.migration] * (
            self.state in ('moved', 'away'))


#: states of a server in which nothing of it is half done
CERTAIN = 'active', 'off', 'moved', 'away', 'coming'


class Broken(AssertionError):
    """Something that always holds does not."""


class World:
    """One compute host, its cloud and the servers on it."""

    def __init__(self, pools: str):
        """:param pools: [accel] pools"""
        self._ends = contextlib.ExitStack()
        with contextlib.ExitStack() as ends:
            self._set_up(pools, ends)
            self._ends = ends.pop_all()

    def _set_up(self, pools, ends):
        def use(fixture):
            ends.enter_context(fixture)
            return fixture
        self.directory = use(fixtures.TempDir()).path
        host = use(simulated.SimulatedHost(
            *(simulated.with_vfs({'address': a}) for a in (A, B)),
            nvmes=[{'address': a} for a in DISKS],
            vgpus=[vgpus.gpu('mdev')]))
        self.kernel = host.kernel
        unborn = base.Host(self.directory, host.path)
        self.cloud = unborn.cloud
        self._upload(unborn)
        self.compute = killed.Processes(
            self.directory, host.path, enabled_drivers=[
                'dfl', 'nvme', 'vgpu'],
            include_devices=['address=*'], pools=pools,
            virtual_functions=[f'{A}=1', f'{B}=1'],
            simulated_host=host.path, runtime_programming_pause=0,
            bitstream_cache=f'{self.directory}/cache')
        ends.callback(self.compute.end)
        self.servers: list[Server] = []
        #: serial number of a disk -> server that wrote to it last
        self.secrets: dict[str, str] = {}
        self.disabled = self.reserved = False
        #: those that are disabled, and handles that were claimed before
        self.refused_devices: set[str] = set()
        self.known: set[str] = set()
        #: pairs of cards that have changed places
        self.exchanged: set[tuple[str, str]] = set()
        #: an older copy of the store is there, and no nova-compute has seen it
        self.old_store = False
        #: a nova-compute has begun without a store
        self.lost_store = False
        self.counted: collections.Counter = collections.Counter()
        self.compute.run([['report'], ['report']])
        self.shown = self._shown()

    def _upload(self, host):
        self.images = {f: host.upload(f) for f in (FUNCTION, OTHER)}
        self.own = host.upload(OWN, {
            'visibility': 'private', 'owner': clouds.PROJECT})
        host.upload(BLANK, CLEARS)

    def close(self):
        self._ends.close()

    # What can be seen

    def claims(self):
        return (claim_store.copy_of(self.store).claims()
                if os.path.exists(self.store) else ())

    @property
    def store(self):
        return os.path.join(self.directory, claim_store.file_name(clouds.NODE))

    def away(self):
        """Addresses of the slots whose cards are not there."""
        cards = self.kernel._look()[1]['cards']
        return {a for pair in EXCHANGED for a in pair
                if cards[a]['faults'].get('vanish')}

    def _disks(self):
        """Serial number -> (address, data) of what is plugged in."""
        cards = self.kernel._look()[1]['cards']
        return {cards[a]['serial']: (a, cards[a]['data']) for a in DISKS}

    def serials(self, server):
        return tuple(serial for serial, holder in self.secrets.items()
                     if holder == server.uuid)

    def _shown(self):
        return {p['name']: {name: (item['total'], item['reserved'])
                            for name, item in p['inventory'].items()}
                for p in self.cloud.read()['providers'].values()}

    # Placement

    def place(self, kind, which):
        """An allocation; None without room."""
        state, room = self.cloud.read(), []
        for uuid_, provider in sorted(state['providers'].items()):
            item = provider['inventory'].get(kind.resource_class)
            used = sum(
                a.get(uuid_, {}).get('resources', {}).get(
                    kind.resource_class, 0)
                for a in state['allocations'].values())
            if item and used < item['total'] - item['reserved']:
                room.append(uuid_)
        return room and {room[which % len(room)]: {
            'resources': {kind.resource_class: 1}}} or None

    # Steps of nova-compute

    def do(self, *steps, at=None) -> bool:
        """Have nova-compute take steps.

        :returns: whether it was killed in the middle.
        """
        try:
            for sentence in self.compute.run(
                    [['attempt', *step] for step in steps], at):
                if sentence:
                    check_sentence(sentence)
                    self.counted['refused'] += 1
                    self.refused = sentence
        except killed.Killed:
            self.counted['kills'] += 1
            return True
        self.old_store = False
        return False

    # How servers end

    def end(self, server, at=None):
        """Nova deletes a server, also after an error."""
        server.state = 'deleting'
        for serial in self.serials(server):
            del self.secrets[serial]
        if self.do(['delete_moved', server.uuid], at=at):
            return
        self.gone(server)

    def gone(self, server):
        self.servers.remove(server)
        if server.uuid in self.cloud.read()['servers']:
            self.cloud.delete_server(server.uuid)

    def roll_back(self, server):
        self.cloud.stop_guest(server.uuid, undefine=True)
        if server.uuid in self.cloud.read()['servers']:
            self.cloud.allocate(server.uuid, None)
            self.cloud.delete_server(server.uuid)
        self.servers.remove(server)

    def are_off(self):
        for server in [*self.servers]:
            if server.state == 'active':
                server.state = 'off'
            elif server.state == 'coming':
                self.roll_back(server)

    # What always holds

    def _in_guests(self):
        return {uuid_: guest['devices'] for uuid_, guest
                in self.cloud.read()['guests'].items() if guest['running']}

    def check(self):
        guests = self._in_guests()
        there = collections.Counter(a for g in guests.values() for a in g)
        for address, count in there.items():
            if count > 1:
                raise Broken(f'{address} is in {count} guests')
        claims = self.claims()
        holders = {c.handle.address: c.instance_uuid for c in claims}
        if len(holders) < len(claims):
            raise Broken('A handle has two claims')
        if not self.old_store:
            self._check_disabled(claims)
            for uuid_, devices in guests.items():
                for address in devices:
                    if holders.get(address) != uuid_:
                        raise Broken(f'The guest of {uuid_} has {address}, '
                                     f'claimed by {holders.get(address)}')
        self._check_data(guests)
        self._check_functions(guests)

    def _check_offers(self):
        """Placement offers no disk with a server's data."""
        state = self.cloud.read()
        there = {p['name'].rpartition('_')[2]: (uuid_, p['inventory'])
                 for uuid_, p in state['providers'].items()}
        for serial, (address, _) in self._disks().items():
            uuid_, inventory = there.get(address, ('', {}))
            used = sum(a.get(uuid_, {'resources': {SSD: 0}})['resources'][SSD]
                       for a in state['allocations'].values())
            if serial in self.secrets and SSD in inventory and (
                    used < inventory[SSD]['total'] - inventory[SSD][
                        'reserved']):
                raise Broken(f'Placement offers {address}, which has the data '
                             f'of {self.secrets[serial]}')

    def _check_disabled(self, claims):
        """No server gets a device that the operator has disabled."""
        for claim in claims:
            if (claim.uuid not in self.known and claim.instance_uuid
                    and claim.device_address in self.refused_devices
                    and not self.exchanged):
                raise Broken(f'{claim.instance_uuid} has got '
                             f'{claim.device_address}, which is disabled')
        self.known |= {claim.uuid for claim in claims}

    def _check_data(self, guests):
        for serial, (address, data) in self._disks().items():
            owner = self.secrets.get(serial)
            if owner and data != owner:
                raise Broken(f'What {owner} wrote to {serial} was erased')
            for uuid_, devices in guests.items():
                if address in devices:
                    if data not in ('', uuid_):
                        raise Broken(f'{uuid_} reads what {data} wrote')
                    self.kernel.write_disk(address, uuid_)
                    self.secrets[serial] = uuid_
        for uuid_, devices in guests.items():
            for function in {vf(A), vf(B)} & set(devices):
                found = self.kernel.guest_reads(function).get('registers')
                if found not in (None, uuid_):
                    raise Broken(f'{uuid_} reads what {found} wrote')
                self.kernel.guest_writes(function, registers=uuid_)
            for name in devices:
                if '-' in name and not self.kernel.exists(
                        f'bus/mdev/devices/{name}'):
                    raise Broken(f'The vGPU {name} of {uuid_} is removed')

    # What holds once nova-compute had time

    def rest(self):
        """Check that all agree, and that nothing is withheld without a
        reason."""
        self.do(['scan'], ['reconcile'], ['settle'], ['report'], ['reconcile'],
                ['report'])
        self.check()
        left, withheld = self.compute.run([['left'], ['withheld']])
        self._check_offers()
        certain = [s for s in self.servers if s.state in CERTAIN]
        self._check_claims(certain, withheld)
        self._check_metadata(certain)
        ended = {c.instance_uuid for c in self.claims()} - {
            s.uuid for s in self.servers}
        moving = any(s.state in ('moved', 'away', 'coming') for s in certain)
        if len(certain) == len(self.servers) and not (
                self.disabled or self.exchanged or self.away()
                or self.compute.options.get('exclude_devices')):
            self.counted['calm'] += 1
            if ended:
                raise Broken(f'Servers {ended} have ended, and have claims')
            if not moving and not self.reserved:
                self.counted['calmer'] += 1
            holds = {address: self._unexplained(address, holds, moving)
                     for address, holds in withheld.items()}
            if any(holds.values()):
                raise Broken(f'Withheld, and nothing is left to settle: '
                             f'{holds}')

    def _unexplained(self, address, holds, moving):
        kinds = {kind for kind, _ in holds}
        explained = {'unallocated'} if moving or self.reserved else set()
        if 'unusable' in kinds and self.lost_store and any(
                address in devices for devices in self._in_guests().values()):
            # the port of a VF that a guest has is hidden: a new store does not
            # have what it carries, and Placement allocates nothing of it
            explained |= {'unusable', 'unallocated'}
        if any(address in guest['devices'] for guest in self.cloud.read()[
                'guests'].values() if not guest['running']):
            # where its server had its card before the claim followed that
            explained |= {'returned'}
        return [hold for hold in holds if hold[0] not in explained]

    def _check_claims(self, servers, withheld):
        """Each consumer has claims of what Placement has allocated to it."""
        allocations = self.cloud.read()['allocations']
        claims = self._kept()
        for server in servers:
            for consumer in server.consumers:
                # what a live migration has here is allocated to its server
                holder = (server.migration if server.state == 'coming'
                          else consumer)
                has = collections.Counter(
                    c.provider_uuid for c in claims
                    if c.consumer_uuid == holder)
                allocated = {
                    uuid_: sum(allocation['resources'].values()) for
                    uuid_, allocation in allocations.get(consumer, {}).items()}
                if has != allocated and not any(
                        c.consumer_uuid == holder and 'unallocated' in dict(
                            withheld.get(c.handle.address, ()))
                        for c in claims):
                    raise Broken(
                        f'{consumer} of a server that is {server.state} has '
                        f'claims of {dict(has)}, and is allocated {allocated}')

    def _kept(self):
        """Return the claims but for those that end: a disk that is away is
        cleaned when it comes back."""
        return [c for c in self.claims()
                if c.state is not model.ClaimState.DELETING]

    def _check_metadata(self, servers):
        guests, claims = self.cloud.read()['guests'], self._kept()
        for server in servers:
            if server.uuid not in guests:
                continue
            text = guests[server.uuid]['carried']
            there = carrying.parse(text, server.uuid).claims if text else ()
            if {_identity(c) for c in there} != {
                    _identity(c) for c in claims
                    if c.instance_uuid == server.uuid}:
                raise Broken(f'The guest of {server.uuid}, {server.state}, '
                             f'carries {text}')

    def _check_functions(self, guests):
        cards = self.kernel._look()[1]['cards']
        for server in self.servers:
            if server.kind.function and server.state == 'active':
                for function in set(guests.get(server.uuid, ())):
                    found, = cards[simulated.pf(function)]['functions']
                    if plain(found) != plain(server.kind.function):
                        raise Broken(f'{server.uuid} has {found}')

    def finish(self):
        """End all, and check that nothing is left of any server."""
        self.rest()
        self._to_rights()
        self.rest()
        for server in [*self.servers]:
            if server.state == 'coming':
                self.roll_back(server)
            else:
                self.end(server)
        self.do(*[['scan'], ['reconcile'], ['settle'], ['report']] * 2)
        self.do(['reattach'], ['reconcile'], ['report'])
        (claims, guests, fenced), why = self.compute.run(
            [['left'], ['withheld']])
        if claims or guests or fenced or why:
            raise Broken(f'After the last server: claims {claims}, guests '
                         f'{guests}, withheld {fenced}: {why}')
        for function in vf(A), vf(B):
            if base.function_on_card(self.kernel, function) == plain(OWN):
                raise Broken(f'{function} carries the image of a project')
        if self._shown() != self.shown:
            raise Broken(f'Placement shows {self._shown()}, and showed '
                         f'{self.shown} at the start')
        self._fill()

    def _to_rights(self):
        """The operator undoes what he did."""
        if self.old_store:
            self.do(['reconcile'])
        self.compute.end()
        self.compute.options['exclude_devices'] = []
        self.are_off()
        self.cloud.lose_power()
        for card in self.away():
            self.kernel.set_fault(card, vanish=None)
        self.kernel.power_cycle()
        for pair in self.exchanged:
            self.kernel.exchange_cards(*pair)
        self.exchanged = set()
        self.refused_devices = set()
        self.do(['enable'], ['ten_minutes_pass'], ['reconcile'], ['settle'])
        self.check()

    def _fill(self):
        """Every device can be had, and nothing is on it."""
        for kind in (KINDS[0], KINDS[0], KINDS[2], KINDS[2], KINDS[-1]):
            allocation = self.place(kind, 0)
            if not allocation:
                raise Broken(f'No room for {kind.resource_class}')
            server = Server(str(uuid.uuid4()), kind)
            self.servers.append(server)
            self.refused = ''
            self.do(['boot', kind.specs, allocation, None, server.uuid])
            if self.refused:
                raise Broken(f'The next server: {self.refused}')
            self.check()


def _identity(claim):
    return claim.uuid, claim.consumer_uuid, claim.handle.address


def check_sentence(text: str) -> None:
    """:raises Broken: it is not one sentence."""
    if not re.fullmatch(r'\S[^\n]{10,}\.', text):
        raise Broken(f'Not a sentence: {text!r}')
