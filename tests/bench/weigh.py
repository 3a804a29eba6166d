# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a scheduling costs with our filter and weigher, and without.

Nova's own HostState, RequestSpec, filter and weight handlers, and a real
Placement in this process (sqlite in memory, no network) that holds every host
and region. Run with ``python -m tests.bench.weigh [hosts]``.
"""

import os
import statistics
import sys
import time
import uuid

os.environ.setdefault('OS_NOVA_DISABLE_EVENTLET_PATCHING', 'true')
# chooses the threading mode, and so comes before the rest of Nova
import nova.tests.functional  # noqa: E402,F401

from nova import objects  # noqa: E402
from nova.scheduler import filters as nova_filters  # noqa: E402
from nova.scheduler import host_manager  # noqa: E402
from nova.scheduler import weights as nova_weights  # noqa: E402
from placement import db_api  # noqa: E402
from placement.db.sqlalchemy import models  # noqa: E402
from placement.tests.functional.fixtures import placement  # noqa: E402
import requests  # noqa: E402
import sqlalchemy as sa  # noqa: E402

from nova_accel import conf  # noqa: E402
from nova_accel import naming  # noqa: E402
from nova_accel.scheduler import filters  # noqa: E402
from nova_accel.scheduler import placement_cache  # noqa: E402
from nova_accel.scheduler import weights  # noqa: E402

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
REGIONS = 4
#: functions in the fleet: the first is on one region of ten, the others share
#: what is left, and every fourth region is empty
FUNCTIONS = [uuid.uuid5(uuid.NAMESPACE_DNS, f'function{n}').hex
             for n in range(20)]
ROUNDS = 5


def fleet(count):
    """(host uuid, [(region uuid, function or None)]) of each host."""
    hosts = []
    for host in range(count):
        regions = []
        for region in range(REGIONS):
            number = host * REGIONS + region
            if number % 10 == 0:
                function = FUNCTIONS[0]
            elif number % 4 == 3:
                function = None
            else:
                function = FUNCTIONS[1 + number % (len(FUNCTIONS) - 1)]
            regions.append((str(uuid.uuid4()), function))
        hosts.append((str(uuid.uuid4()), regions))
    return hosts


def fill(engine, hosts):
    """Put the fleet into Placement's tables."""
    traits = [naming.PROGRAMMABLE]
    for function in FUNCTIONS:
        spelled = naming.function_trait(function)
        traits += [spelled, spelled.replace('FPGA_', 'FPGA_INTEL_'),
                   spelled.replace('FUNCTION_', 'FUNCTION_INTEL_')]
    with engine.begin() as connection:
        first = 1 + (connection.execute(
            sa.select(sa.func.max(models.Trait.id))).scalar() or 0)
        ids = {name: first + n for n, name in enumerate(traits)}
        connection.execute(models.Trait.__table__.insert(), [
            {'id': i, 'name': name} for name, i in ids.items()])
        connection.execute(models.ResourceClass.__table__.insert(), [
            {'id': 10000, 'name': FPGA}])
        providers, inventories, links = [], [], []
        for root, regions in hosts:
            parent = len(providers) + 1
            providers.append({'id': parent, 'uuid': root, 'name': root,
                              'root_provider_id': parent,
                              'parent_provider_id': None, 'generation': 0})
            for region, function in regions:
                number = len(providers) + 1
                providers.append({
                    'id': number, 'uuid': region, 'name': region,
                    'root_provider_id': parent, 'parent_provider_id': parent,
                    'generation': 0})
                inventories.append({
                    'resource_provider_id': number, 'resource_class_id': 10000,
                    'total': 1, 'reserved': 0, 'min_unit': 1, 'max_unit': 1,
                    'step_size': 1, 'allocation_ratio': 1.0})
                carried = {naming.PROGRAMMABLE}
                if function:
                    dashed = naming.function_trait(function)[-36:]
                    carried |= {t for t in traits if t.endswith(dashed)}
                links += [{'resource_provider_id': number, 'trait_id': ids[t]}
                          for t in carried]
        connection.execute(models.ResourceProvider.__table__.insert(),
                           providers)
        connection.execute(models.Inventory.__table__.insert(), inventories)
        connection.execute(models.ResourceProviderTrait.__table__.insert(),
                           links)


def states(hosts):
    """HostStates with one candidate for each region, as after Placement."""
    result = []
    for number, (root, regions) in enumerate(hosts):
        state = host_manager.HostState(f'host{number}', f'host{number}',
                                       'cell')
        state.update(compute=objects.ComputeNode(
            uuid=root, memory_mb=65536, free_ram_mb=65536 - number,
            vcpus=32, vcpus_used=number % 32, local_gb=1000, local_gb_used=0,
            free_disk_gb=1000, disk_available_least=None, numa_topology=None,
            pci_device_pools=None, host_ip='192.0.2.1', metrics=None,
            hypervisor_type='QEMU', hypervisor_version=8000000, stats={},
            hypervisor_hostname=f'host{number}', cpu_info='', updated_at=None,
            supported_hv_specs=[], cpu_allocation_ratio=4.0,
            ram_allocation_ratio=1.0, disk_allocation_ratio=1.0))
        state.allocation_candidates = [
            {'allocations': {
                root: {'resources': {'VCPU': 1, 'MEMORY_MB': 64}},
                region: {'resources': {FPGA: 1}}},
             'mappings': {'': [root], '_ACCEL0': [region]}}
            for region, _ in regions]
        result.append(state)
    return result


def spec(function):
    extra = {'hw:cpu_policy': 'shared'}
    if function:
        extra |= {f'resources_ACCEL0:{FPGA}': '1',
                  'accel_ACCEL0:function_id': function}
    return objects.RequestSpec(
        flavor=objects.Flavor(extra_specs=extra, vcpus=1, memory_mb=64,
                              root_gb=1, ephemeral_gb=0, swap=0),
        num_instances=1, instance_group=None, scheduler_hints={}, image=None,
        requested_destination=None, instance_uuid=str(uuid.uuid4()))


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    objects.register_all()
    hosts = fleet(count)
    asked = []
    fixture = placement.PlacementFixture()
    with fixture:
        fill(db_api.get_placement_engine(), hosts)
        session = requests.Session()

        def get(url, version):
            asked.append(url)
            return session.get(fixture.endpoint + url, headers={
                'x-auth-token': 'admin',
                'OpenStack-API-Version': f'placement {version}'})

        stock = [c() for c in nova_weights.all_weighers()]
        ours = [*stock, weights.AcceleratorWeigher()]
        filter_handler = nova_filters.HostFilterHandler()
        handler = nova_weights.HostWeightHandler()

        def without(function, state):
            handler.get_weighed_objects(stock, state, spec(function))

        def with_ours(function, state):
            wanted = spec(function)
            state = filter_handler.get_filtered_objects(
                [filters.AcceleratorFilter()], state, wanted)
            handler.get_weighed_objects(ours, state, wanted)

        nobody = uuid.uuid4().hex
        cases = [('no accelerator', None, 0), ('no accelerator', None, 10),
                 ('function on 1 region of 10', FUNCTIONS[0], 0),
                 ('function on 1 region of 10', FUNCTIONS[0], 10),
                 ('function nowhere', nobody, 0),
                 ('function nowhere', nobody, 10)]
        print(f'{count} hosts, {REGIONS} candidates each, '
              f'{len(FUNCTIONS)} functions in the fleet; median of {ROUNDS} '
              f'schedulings, ms')
        print(f'{"flavor":27} {"cache":>7} {"requests":>8} {"without":>8} '
              f'{"with":>8} {"ratio":>6} {"Placement":>9}')
        for name, function, seconds in cases:
            conf.CONF.set_override('function_cache_seconds', seconds, 'accel')
            spent = []

            def timed_get(url, version):
                start = time.perf_counter()
                try:
                    return get(url, version)
                finally:
                    spent.append(time.perf_counter() - start)
            filters.PLACEMENT = placement_cache.PlacementCache(timed_get)
            # the first one warms up Python, too
            with_ours(function, states(hosts))
            times = {without: [], with_ours: []}
            asked.clear()
            spent.clear()
            for _ in range(ROUNDS):
                for run in times:
                    state = states(hosts)
                    start = time.perf_counter()
                    run(function, state)
                    times[run].append(1000 * (time.perf_counter() - start))
            base, more = map(statistics.median, times.values())
            print(f'{name:27} {"warm" if seconds else "none":>7} '
                  f'{len(asked) / ROUNDS:8.0f} {base:8.1f} {more:8.1f} '
                  f'{more / base:6.2f} {1000 * sum(spent) / ROUNDS:9.1f}')


if __name__ == '__main__':
    main()
