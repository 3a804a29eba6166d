# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a report to Placement costs in which nothing has changed.

The part of nova-compute's periodic task, and of each claim, that tells
Placement what the host has, on simulated hosts: one with Nova's LibvirtDriver,
three with 8, 64 and 512 FPGA regions, and one with 8 GPUs and 64 VFs of four
QAT devices, before and after its devices are in pools ([accel] pools = none,
and host). Real nova-compute and Placement in one process
(tests.functional.base). Run with
``python -m tests.bench.report [passes [regions ...]]``.

Counted: requests to Placement, statements of the claim store, subprocesses.
Times, each in one place only: "ours", the pass of our driver without that of
LibvirtDriver; "LibvirtDriver", the latter; "Placement", the requests;
"rest of Nova", copying and comparing the provider tree. "First" is ours for
the pass that makes all the providers in the tree, at the start of the service.
Of the regions also "compared": requests to Placement of a comparison of claims
(attach.reconcile) where a server has each region, of the first, and of the next
one in which nothing has changed. Of the pools also "changed": processor time
of our pass alone, without Nova, where one of as many devices as there are
regions is not what it was before.

Not measured: looking for devices, which runs in a thread when they may have
changed, and the network. The times are of a process that has an API, a
scheduler and Placement beside nova-compute: compare them with each other.
"""

import dataclasses
import functools
import statistics
import sys
import time
import uuid

from nova_accel.store import claim_store
from tests.bench import boot
from tests.functional import base

from nova.compute import provider_tree  # noqa: I100 (after base)
from nova.compute import resource_tracker
from nova import context
from nova.scheduler.client import report
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel import inventory
from nova_accel.inventory import tree as inventory_tree
from nova_accel import model
from nova_accel import naming
from nova_accel.virt.driver import AccelLibvirtDriver
from tests.unit import inventory_host

#: ports of a simulated card
PORTS = 4
QATS = [f'0000:{bus}:00.0' for bus in ('6b', '70', '75', '7a')]
GPUS_AND_VFS = {
    'gpus': [{'address': f'0000:{0x10 + number:02x}:00.0',
              'iommu_group': 10 + number} for number in range(8)],
    'qats': [{'address': address} for address in QATS]}
PASS = 'pass'
TIMED = [
    (PASS, 'rest of Nova', resource_tracker.ResourceTracker,
     '_update_to_placement'),
    (PASS, 'LibvirtDriver', libvirt_driver.LibvirtDriver,
     'update_provider_tree'),
    (PASS, 'ours', AccelLibvirtDriver, 'update_provider_tree'),
    *((None, 'claim store', claim_store.ClaimStore, name)
      for name, value in vars(claim_store.ClaimStore).items()
      if callable(value) and not name.startswith('_')),
]
PLACEMENT = [
    (None, 'read' if name == 'get' else 'write',
     report.SchedulerReportClient, name)
    for name in ('get', 'put', 'post', 'delete')]
COUNTS = {'reads': (PASS, 'read'), 'writes': (PASS, 'write'),
          'SQL': ('claim store', 'statements'),
          'subprocesses': ('subprocesses', 'all')}


class Reports(boot.Metered, base.AcceleratorTestBase):

    FRESH_CLOUD = True
    HOSTS = {}
    TIMED = TIMED
    NOVAS = PLACEMENT

    def runTest(self):
        arguments = [int(a) for a in sys.argv[1:]]
        passes, sizes = arguments[:1] or [9], arguments[1:] or [8, 64, 512]
        print(f'median of {passes[0]} passes, times in ms\n'
              f'{"host":16} {"providers":>9} '
              + ' '.join(f'{name:>6}' for name in COUNTS)
              + f' {"first":>7} {"ours":>6} {"(processor)":>11}'
              f' {"LibvirtDriver":>13} {"Placement":>9} {"rest of Nova":>12}'
              f' {"ours/all":>8}', file=boot.OUT)
        self.flags(compute_driver='libvirt.LibvirtDriver')
        self.show('LibvirtDriver', *self.measure('stock', {}, passes[0]))
        self.flags(compute_driver='accel.AccelLibvirtDriver')
        for size in sizes:
            self.show(f'{size} regions', *self.measure(
                f'host{size}', {'cards': [
                    base.card(f'0000:{number // 32:02x}:{number % 32:02x}.0',
                              [base.NLB0, base.NLB3] * (PORTS // 2))
                    for number in range(size // PORTS)]}, passes[0]))
            print(f'{"":16} compared: {self.compare(f"host{size}")}',
                  file=boot.OUT, flush=True)
        self.flags(enabled_drivers=['gpu', 'qat'], group='accel',
                   virtual_functions=[f'{qat}=16' for qat in QATS])
        for pools in ('none', 'host'):
            self.flags(pools=pools, group='accel')
            self.show(f'pools = {pools}', *self.measure(
                f'pools-{pools}', GPUS_AND_VFS, passes[0]))
            print(f'{"":16} changed: '
                  f'{self.change(sizes[-1], passes[0]):.1f} ms of '
                  f'{sizes[-1]} devices', file=boot.OUT, flush=True)

    def measure(self, host, description, passes):
        """Providers, ours at the start, [(counts, spent, worked)]."""
        self.describe_host(host, {'cards': [], **description})
        self.meter.clear()
        self.start_compute(host)
        first = self.meter.spent[PASS, 'ours']
        tracker = self.computes[host].manager.rt
        results = []
        # what is set at the start is seen in the next one
        for number in range(passes + 2):
            self.meter.clear()
            tracker.update_available_resource(
                context.get_admin_context(), host)
            if number > 1:
                results.append(self.meter.read())
        return (len(tracker.provider_tree.get_provider_uuids(host)), first,
                results)

    @staticmethod
    def change(size, passes):
        """Milliseconds of processor time."""
        driver = inventory_host.Driver(*(model.Device(
            address=address, type='GPU', vendor='ACME', product='G1',
            vendor_id='1234', product_id='0002', driver='good',
            handles=(inventory_host.handle(address),))
            for number in range(size) for address in [
                f'0000:{number // 32:02x}:{number % 32:02x}.0']))
        driver.POOLED = True
        found = inventory.Inventory(
            {'good': driver}, claim_store.ClaimStore(claim_store.MEMORY))
        found.scanner.scan()
        tree, took = provider_tree.ProviderTree(), []
        tree.new_root('host', str(uuid.uuid4()), generation=0)

        def write(provider, change, refused):
            data = tree.data(provider)
            change(data.inventory, data.traits)
        for number in range(passes + 2):
            found.table.adoption.adopt(dataclasses.replace(
                driver.devices[number % size], health=model.Health.QUARANTINED,
                reason=f'pass {number}'), found.table.reports.ticket())
            began = time.process_time()
            found.shown.update_tree(tree, 'host', inventory_tree.Placement(
                lambda provider: False, write=write))
            took.append(1000 * (time.process_time() - began))
        found.close()
        # the first two make all providers, and see that they are there
        return statistics.median(took[2:])

    def compare(self, host):
        """Requests of a comparison, and of the next one."""
        self.hold_all(host)
        requests = []
        for _ in range(2):
            # Nova's copy is as Placement again, as after five minutes
            manager = self.computes[host].manager
            manager.reportclient.clear_provider_cache()
            manager.rt.update_available_resource(
                context.get_admin_context(), host)
            self.meter.clear()
            manager.driver.parts.reconciler.run()
            requests.append(sum(
                count for (_, kind), count in self.meter.counts.items()
                if kind == 'read'))
        return requests

    def hold_all(self, host):
        """Have a server of its own have each region."""
        parts = self.computes[host].driver.parts
        claims = []
        for provider in parts.inventory.shown.providers().values():
            if provider.region_index is None:
                continue
            address, = provider.addresses
            region = parts.inventory.devices[address].region(
                provider.region_index)
            name, = naming.accelerators(provider.inventory)
            server = str(uuid.uuid4())
            claims.append(model.Claim(
                uuid=str(uuid.uuid4()), instance_uuid=server,
                consumer_uuid=server, project_id='one',
                provider_uuid=provider.uuid, resource_class=name, group='1',
                device_address=address, region_index=region.index,
                handle=region.handles[0], state=model.ClaimState.BOUND))
            self.placement.put(f'/allocations/{server}', {
                'allocations': {provider.uuid: {'resources': {name: 1}}},
                'project_id': 'one', 'user_id': 'one',
                'consumer_generation': None}, version='1.28')
        parts.holdings.claim(claims)

    @staticmethod
    def show(name, providers, first, results):
        def median(pick):
            return statistics.median(map(pick, results))

        def placement(times):
            return times[PASS, 'read'] + times[PASS, 'write']
        everything = median(lambda r: sum(
            v for (place, _), v in r[1].items() if place == PASS))
        print(f'{name:16} {providers:9} ' + ' '.join(
            f'{median(lambda r, w=what: r[0][w]):{max(6, len(head))}.0f}'
            for head, what in COUNTS.items())
            + f' {first:7.1f} {median(lambda r: _driver(r[1])):6.2f}'
            f' {median(lambda r: _driver(r[2])):11.2f}'
            f' {median(lambda r: r[1][PASS, "LibvirtDriver"]):13.2f}'
            f' {median(lambda r: placement(r[1])):9.1f}'
            f' {median(lambda r: r[1][PASS, "rest of Nova"]):12.1f}'
            f' {median(lambda r: _driver(r[1])) / everything:8.2f}',
            file=boot.OUT, flush=True)


def _driver(times):
    return times[PASS, 'ours'] + times[PASS, 'claim store']


main = functools.partial(boot.main, Reports)

if __name__ == '__main__':
    main()
