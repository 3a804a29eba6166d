# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Random operations on several servers, with faults, and what always holds.

One cloud for many sequences: each begins with a cloud as at its start, and
ends with every server deleted and nothing left of any. A sequence follows
from its seed, except that two operations that run at a time may end in either
order.

Without more said as many sequences are run as fit into the time budget, the
same each day. In the environment:

NOVA_ACCEL_SEQUENCES
    run that many sequences, however long they take.
NOVA_ACCEL_SEED
    the seed of the first sequence, 1 where it is not said; the others have
    those that follow. A failure names its seed: with it, and
    NOVA_ACCEL_SEQUENCES=1, it is played again. ``random`` begins anywhere.
NOVA_ACCEL_VERBOSE
    show also the operations of sequences that go well.
"""

import collections
import contextlib
import itertools
import os
import random
import shutil
import sys
import time
from unittest import mock

from keystoneauth1 import exceptions as ks_exc
from nova import exception as nova_exception
from nova.scheduler.client import report
from nova.tests.functional.api import client as api_client
from testtools import content

from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from tests.functional import base
from tests.functional import operations

#: seconds in which no further sequence is begun
BUDGET = 150
STEPS = 20
SERVERS = 4
#: seconds until an operation must have ended, and all be as it is to be
SETTLED = 60
#: within which the last event of an operation ends
LAST_EVENT = 2
POLL = 0.02

CARDS = ('0000:5e:00.0', '0000:af:00.0')
FPGA = 'CUSTOM_ACCELERATOR_FPGA'

#: operation -> (request, states of the server in which there is a use in it)
ACTIONS = {
    'stop': ({'os-stop': None}, 'ACTIVE'),
    'start': ({'os-start': None}, 'SHUTOFF'),
    'reboot soft': ({'reboot': {'type': 'SOFT'}}, 'ACTIVE'),
    'reboot hard': ({'reboot': {'type': 'HARD'}},
                    'ACTIVE SHUTOFF PAUSED SUSPENDED ERROR'),
    'pause': ({'pause': None}, 'ACTIVE'),
    'unpause': ({'unpause': None}, 'PAUSED'),
    'suspend': ({'suspend': None}, 'ACTIVE'),
    'resume': ({'resume': None}, 'SUSPENDED'),
    'rescue': ({'rescue': {'adminPass': 'secret'}}, 'ACTIVE SHUTOFF'),
    'unrescue': ({'unrescue': None}, 'RESCUE'),
    'rebuild': (None, 'ACTIVE SHUTOFF ERROR'),
    'resize': (None, 'ACTIVE SHUTOFF'),
    'migrate': ({'migrate': None}, 'ACTIVE SHUTOFF'),
    'confirm': ({'confirmResize': None}, 'VERIFY_RESIZE'),
    'revert': ({'revertResize': None}, 'VERIFY_RESIZE'),
    'shelve': ({'shelve': None}, 'ACTIVE SHUTOFF PAUSED SUSPENDED'),
    'unshelve': ({'unshelve': None}, 'SHELVED_OFFLOADED'),
    'delete': (None, 'ACTIVE SHUTOFF PAUSED SUSPENDED RESCUE VERIFY_RESIZE '
                     'SHELVED_OFFLOADED ERROR'),
}
#: states in which nothing is under way
AT_REST = {state for _, states in ACTIONS.values() for state in states.split()}
#: states in which there is a guest on the server's host
WITH_GUEST = AT_REST - {'SHELVED_OFFLOADED', 'ERROR'}


class RandomOperationsTest(operations.OperationsTestBase):

    def setUp(self):
        super().setUp()
        self.flags(allow_resize_to_same_host=True)
        # a guest that is off already, as after a failed shelve, is waited for
        self.flags(wait_soft_reboot_seconds=1, group='libvirt')
        image = self.upload_bitstream(base.NLB3, properties={})
        nlb0 = base.fpga_flavor(function_id=base.NLB0)
        #: name of the flavor -> functions that its servers' regions carry
        self.flavors = {}
        for name, functions, specs in (
                ('none', [], {}),
                ('any', [None], base.fpga_flavor()),
                ('loaded', [base.NLB0], nlb0),
                ('programmed', [base.OPENCL],
                 base.fpga_flavor(function_id=base.OPENCL)),
                ('image', [base.NLB3], base.fpga_flavor(bitstream_id=image)),
                ('two', [base.NLB0, base.OPENCL], {
                    **nlb0, 'group_policy': 'isolate',
                    **base.fpga_flavor('2', function_id=base.OPENCL)})):
            self._create_flavor(id=name, name=name, extra_spec=specs, disk=5)
            self.flavors[name] = [f and f.replace('-', '') for f in functions]
        self.images = [self.glance.guest_image, self.glance.service.upload(
            self.glance.client, 'other', b'another', visibility='public')[
                'id']]
        self.counted = collections.Counter()

    def test_random_operations(self):
        """Any sequence of operations, with faults: promises 1 to 3 hold."""
        count = int(os.environ.get('NOVA_ACCEL_SEQUENCES', 0))
        first = os.environ.get('NOVA_ACCEL_SEED', '1')
        first = (random.SystemRandom().randrange(10 ** 6)
                 if first == 'random' else int(first))
        start = time.monotonic()
        for number in itertools.count():
            if (number >= count if count
                    else time.monotonic() - start > BUDGET):
                break
            self.run_sequence(first + number)
            # what Nova's test fixtures keep of a sequence that went well
            self.stdlog.delete_stored_logs()
            self.notifier.reset()
        self.assertGreater(self.counted['steps'], 0)
        self.say(
            f'{number} sequences from seed {first} on in '
            f'{time.monotonic() - start:.0f} s: ' + ', '.join(
                f'{n} {what}' for what, n in sorted(self.counted.items())))

    @staticmethod
    def say(text):
        """On the screen, which neither Nova's fixtures nor stestr keep."""
        print(text, file=sys.__stderr__, flush=True)

    def run_sequence(self, seed):
        self.random = random.Random(seed)
        #: server uuid -> the name by which the log of a failure calls it
        self.names = {}
        #: uuids of servers whose devices need not be as their flavor says
        self.failed = set()
        #: (host, card) -> the fault that it has until it is mended
        self.broken = {}
        self.log = []
        try:
            for _ in range(STEPS):
                self.step()
                self.wait_for(self.check)
            self.end()
            if os.environ.get('NOVA_ACCEL_VERBOSE'):
                self.say('\n'.join(self.log))
        except Exception:
            text = '\n'.join([
                f'NOVA_ACCEL_SEED={seed} NOVA_ACCEL_SEQUENCES=1 plays this '
                f'again:', *self.log])
            self.addDetail('operations', content.text_content(text))
            self.say(text)
            raise

    # Steps

    def step(self):
        """One operation on the hosts, or one or two on servers."""
        self.counted['steps'] += 1
        servers = {s['id']: s for s in self.servers()}
        if self.names and self.random.random() < 0.15:
            return self.on_a_host()
        chosen = []
        for _ in range(self.random.choice((1, 1, 2))):
            operation = self.choose(servers, chosen)
            if operation:
                chosen.append(operation)
        with contextlib.ExitStack() as faults:
            note = self.fault(faults)
            begun = []
            for name, server, request in chosen:
                of = (f' {self.names[server["id"]]} {server["status"]}'
                      if server else '')
                self.log.append(f'{name}{of} {request or ""}{note}')
                begun += self.begin(name, server, request)
            for server in begun:
                self.settle(*server)
        for server in self.servers():
            self.log.append(
                f'    {self.names[server["id"]]} {server["status"]} '
                f'{server["OS-EXT-SRV-ATTR:host"]} '
                f'{server["flavor"]["original_name"]} '
                f'{server.get("fault", {}).get("message", "")}')

    def choose(self, servers, chosen):
        """(operation, server or None, request or None), or nothing."""
        taken = {server['id'] for _, server, _ in chosen if server}
        free = [s for s in servers.values() if s['id'] not in taken]
        if len(servers) + len(chosen) < SERVERS and (
                not free or self.random.random() < 0.3):
            name = self.random.choice(['create'] * 4 + ['create two'])
            return name, None, {
                'flavorRef': self.random.choice(
                    [*self.flavors, 'loaded', 'programmed', 'image']),
                'max_count': 2 if name == 'create two' else 1}
        if not free:
            return None
        server = self.random.choice(free)
        names = [n for n, (_, states) in ACTIONS.items()
                 if server['status'] in states.split()]
        name = self.random.choice(names)
        request = ACTIONS[name][0]
        if name == 'rebuild':
            request = {name: {'imageRef': self.random.choice(self.images)}}
        elif name == 'resize':
            request = {name: {'flavorRef': self.random.choice([
                f for f in self.flavors
                if f != server['flavor']['original_name']])}}
        return name, server, request

    def begin(self, name, server, request):
        """Ask for an operation; (uuid, operation, state before) of each
        server concerned."""
        self.counted[name] += 1
        if not server:
            before = {s['id'] for s in self.servers()}
            self.api.post_server({'server': {
                'name': 'random', 'imageRef': self.images[0],
                'networks': 'none', **request}})
            made = sorted({s['id'] for s in self.servers()} - before)
            for uuid in made:
                self.names[uuid] = f's{len(self.names) + 1}'
                self.counted['servers'] += 1
            return [(uuid, name, None) for uuid in made]
        # Nova's own files of the guest, where the test has no file system
        os.makedirs(os.path.join(self.instances_path, server['id']),
                    exist_ok=True)
        try:
            if name == 'delete':
                self.api.delete_server(server['id'])
            else:
                self.api.post_server_action(server['id'], request)
        except api_client.OpenStackApiException as refusal:
            if refusal.response.status_code not in (400, 409):
                raise
            self.counted['refused'] += 1
            self.log.append(f'    refused: {refusal}')
        return [(server['id'], name, server['status'])]

    def settle(self, uuid, name, before):
        """Wait until an operation that was begun has ended."""
        at_rest = []

        def ended():
            try:
                server = self.api.get_server(uuid)
            except api_client.OpenStackApiNotFoundException:
                return
            self.assertNotEqual('delete', name, 'it is not deleted')
            self.assertIsNone(server['OS-EXT-STS:task_state'])
            self.assertIn(server['status'], AT_REST)
            if name == 'confirm':
                # of which the state of the server says nothing
                self.assertNotEqual(before, server['status'])
            if server['status'] == 'ERROR':
                self.assertIn('fault', server)
            at_rest.append(time.monotonic())
            if time.monotonic() - at_rest[0] < LAST_EVENT:
                # Nova loses the end of some, as after a rescheduling
                action = self.api.get_instance_actions(uuid)[0]
                events = self.api.api_get(
                    f'/servers/{uuid}/os-instance-actions/'
                    f'{action["request_id"]}').body['instanceAction']['events']
                self.assertNotIn(None, [e['finish_time'] for e in events])
        self.wait_for(ended)

    def wait_for(self, check):
        """Until check() raises nothing more."""
        end = time.monotonic() + SETTLED
        while True:
            try:
                return check()
            except AssertionError:
                if time.monotonic() > end:
                    raise
            time.sleep(POLL)

    def servers(self):
        return self.admin_api.get_servers()

    # Faults, and what happens on hosts

    def fault(self, stack):
        """Perhaps a fault for as long as an operation takes; its name."""
        if self.random.random() > 0.35:
            return ''
        kind = self.random.choice(('programming', 'glance', 'placement'))
        self.counted[f'faults of {kind}'] += 1
        if kind == 'programming':
            error = self.random.choice(('crc', 'operation', 'fifo'))
            count = self.random.choice((None, 1, 1))
            cards = [(h, c) for h in self.HOSTS for c in CARDS]
            if self.random.random() < 0.5:
                cards = [self.random.choice(cards)]
            for host, card in cards:
                if (host, card) in self.broken:
                    continue
                self.simulated(host).set_fault(
                    card, pr_error=error, pr_error_count=count)
                stack.callback(self.simulated(host).set_fault, card,
                               pr_error=None, pr_error_count=None)
            what = f'{error} {count} on {cards}'
        elif kind == 'glance':
            what = self.random.choice(('503', 'truncate', 'flip'))
            self.forget_bitstreams()
            stack.enter_context(self.glance.service.fault(what))
        else:
            method = self.random.choice((
                'get_allocations_for_consumer', 'get_provider_traits',
                'set_traits_for_provider',
                'get_allocations_for_resource_provider'))
            number = self.random.choice((1, 1, 2, 3))
            what = f'{method} number {number}'
            stack.enter_context(self.placement_fails(method, number))
        return f' [{kind}: {what}]'

    def forget_bitstreams(self):
        """So that they have to be fetched from Glance again."""
        directory = os.path.join(self.directory, 'cache')
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))

    @contextlib.contextmanager
    def placement_fails(self, method, number):
        """The call of that number is not answered."""
        client = report.report_client_singleton()
        original = getattr(client, method)
        calls = itertools.count(1)

        def failing(*args, **kwargs):
            # without what it asks for there, Nova itself leaves the
            # allocations of a server that comes back with its migration
            by = sys._getframe(1).f_code.co_name
            if by == '_revert_allocation' or next(calls) != number:
                return original(*args, **kwargs)
            if method == 'get_allocations_for_consumer':
                return None
            if method == 'get_allocations_for_resource_provider':
                raise nova_exception.ResourceProviderAllocationRetrievalFailed(
                    rp_uuid=args[1], error='out of service')
            raise ks_exc.ConnectFailure('Placement cannot be reached')
        with mock.patch.object(client, method, failing):
            yield

    def on_a_host(self):
        host = self.random.choice(list(self.HOSTS))
        card = self.random.choice(CARDS)
        name = self.random.choice((
            'restart', 'reconcile', 'report', 'scan', 'break', 'mend',
            'forget bitstreams'))
        self.counted[name] += 1
        self.log.append(f'{name} {host} {card}')
        if name == 'restart':
            self.restart_compute_service(host)
        elif name == 'reconcile':
            self.computes[host].driver.reconciler.run()
        elif name == 'report':
            self.report()
        elif name == 'scan':
            self.accelerators(host).inventory.scan()
        elif name == 'break':
            self.broken[host, card] = 'crc'
            self.simulated(host).set_fault(card, pr_error='crc')
        elif name == 'mend':
            self.mend()
        else:
            self.forget_bitstreams()

    def mend(self):
        for host, card in self.broken:
            self.simulated(host).set_fault(card, pr_error=None)
        self.broken = {}

    # What always holds

    def check(self):
        """What holds whenever no operation is under way."""
        servers = {s['id']: s for s in self.servers()}
        for server in servers.values():
            self.check_fault(server)
        self.check_claims(servers)
        self.check_guests(servers)
        self.check_functions(servers)

    def check_fault(self, server):
        if server['status'] == 'ERROR':
            self.failed.add(server['id'])
            message = server['fault']['message'].rstrip()
            self.assertEqual(('.', True),
                             (message[-1:], ' ' in message), message)

    def check_claims(self, servers):
        """Each claim has its allocation, each allocation its claim."""
        if any(c.role is model.Role.OLD and servers.get(
                c.instance_uuid, {'status': 'ERROR'})['status'] == 'ERROR'
                for c in self.claims()):
            # nobody tells the source that a resize failed
            for compute in self.computes.values():
                compute.driver.reconciler.run()
        claims = self.claims()
        claimed = collections.Counter(
            (c.provider_uuid, c.consumer_uuid) for c in claims)
        allocated = self.all_allocated()
        self.assertEqual({}, dict(claimed - allocated), claims)
        missing = {consumer for _, consumer in allocated - claimed}
        # of a resize that failed on its destination Nova leaves the server
        # with the allocation for the one flavor, and with the other flavor
        self.assertLessEqual(missing, self.failed)
        for claim in claims:
            self.assertEqual(
                (model.ClaimState.BOUND, ''), (claim.state, claim.error))
            if claim.role is model.Role.CURRENT:
                self.assertEqual(claim.instance_uuid, claim.consumer_uuid)

    def all_allocated(self):
        """(provider uuid, consumer uuid) -> amount, of our providers."""
        allocated = collections.Counter()
        for host in self.computes:
            inventory = self.accelerators(host).inventory
            for uuid, provider in inventory.own_providers().items():
                if provider.region_index is None:
                    continue
                for consumer, allocation in self.placement.get(
                        f'/resource_providers/{uuid}/allocations',
                ).body['allocations'].items():
                    allocated[uuid, consumer] += allocation['resources'][FPGA]
        return allocated

    def check_guests(self, servers):
        """Each guest has what its server holds, and nobody else has it."""
        for host, compute in self.computes.items():
            held = collections.defaultdict(list)
            for claim in self.claims(host):
                if claim.role is model.Role.CURRENT:
                    held[claim.instance_uuid].append(claim.handle.address)
            guests = {
                d.UUIDString(): (d.isActive(),
                                 base.hostdev_addresses(d.XMLDesc(0)))
                for d in compute.driver._host.get_connection()._vms.values()}
            in_guests = []
            for uuid, (active, devices) in guests.items():
                if active:
                    in_guests += devices
                    self.assertLessEqual(set(devices), set(held[uuid]))
                    self.assertEqual(
                        host, servers[uuid]['OS-EXT-SRV-ATTR:host'])
            # the source of a resize that failed on its destination is never
            # told, and keeps the guest, shut off
            self.assertLessEqual(guests.keys() - servers.keys(), self.failed)
            for uuid, server in servers.items():
                if (server['OS-EXT-SRV-ATTR:host'] == host
                        and server['status'] in WITH_GUEST):
                    _, devices = guests[uuid]
                    self.assertEqual(
                        [] if server['status'] == 'SUSPENDED'
                        else sorted(held[uuid]), devices, server)
            self.assertEqual(sorted(in_guests), self.bound_to_vfio(host))

    def bound_to_vfio(self, host):
        kernel = self.simulated(host)
        return [c for c in CARDS if pci.driver(kernel, c) == 'vfio-pci']

    def check_functions(self, servers):
        """The regions of a server carry what its flavor asks for."""
        for uuid, server in servers.items():
            if uuid in self.failed or server['status'] not in WITH_GUEST:
                continue
            claims = [c for c in self.claims() if c.instance_uuid == uuid
                      and c.role is model.Role.CURRENT]
            wanted = self.flavors[server['flavor']['original_name']]
            self.assertEqual(len(wanted), len(claims), server)
            for claim, function in zip(claims, wanted):
                if function:
                    self.assertEqual(function, self.carried(
                        server['OS-EXT-SRV-ATTR:host'], claim))

    def carried(self, host, claim):
        """Also by a card that a guest has, whose sysfs the host has not."""
        _, state = self.simulated(host)._look()
        return state['cards'][claim.device_address]['functions'][
            claim.region_index]

    # The end of a sequence

    def end(self):
        """Delete every server; nothing is left but broken cards."""
        self.log.append('end')
        for server in self.servers():
            self.settle(*self.begin('delete', server, None)[0])
        self.wait_for(self.check_nothing_left)
        self.mend()
        for host, compute in self.computes.items():
            compute.driver._host.get_connection()._vms.clear()
            self.simulated(host).power_cycle()
            self.accelerators(host).inventory.scan()
        self.forget_bitstreams()
        shutil.rmtree(os.path.join(self.instances_path, ''))
        os.makedirs(self.instances_path, exist_ok=True)
        self.report()

    def check_nothing_left(self):
        self.check()
        self.assertEqual([], self.claims())
        self.assertFalse(self.all_allocated())
        for host in self.computes:
            self.accelerators(host).inventory.scan()
        self.report()
        for host in self.HOSTS:
            self.assertEqual([], self.bound_to_vfio(host))
            for card in CARDS:
                name = naming.region_provider_name(host, card, 0)
                inventory, traits, used = self.provider_tree()[name]
                self.assertFalse(any(used.values()))
                if (host, card) not in self.broken:
                    self.assertNotIn(naming.FENCED, traits)
                    self.assertEqual({FPGA: (1, 0)}, inventory)
