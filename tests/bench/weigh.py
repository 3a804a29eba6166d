# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a scheduling costs with our filter and weigher, and without.

Nova's own HostState, RequestSpec, filter and weight handlers, on an answer of
Placement as SchedulerManager gets it: allocation candidates, and summaries of
all providers of their trees. "without" is what Nova does with it: candidates
by host, a copy of them for each host, and its own weighers. "of all" is the
ratio where what a scheduler always does besides is counted on both sides:
reading the answer, and the filters that Nova enables by default; still not
the look-up of the hosts in the cells, nor the wait for Placement. The aim is
1.0 at most, and "ours, us each" (of a candidate) that does not grow with the
candidates.

Times are of the processor, medians of some rounds in which both take turns, and
to be compared with each other only, hence the ratios, which are medians of the
ratios of the rounds. Run with ``python -m tests.bench.weigh [rounds [sizes]]``.
"""

import collections
import copy
import datetime
import gc
import json
import os
import random
import statistics
import sys
import time
import uuid

os.environ.setdefault('OS_NOVA_DISABLE_EVENTLET_PATCHING', 'true')
# chooses the threading mode, and so comes before the rest of Nova
import nova.tests.functional  # noqa: E402,F401

import nova.conf  # noqa: E402
from nova import objects  # noqa: E402
from nova.scheduler import filters as nova_filters  # noqa: E402
from nova.scheduler import host_manager  # noqa: E402
from nova.scheduler import weights as nova_weights  # noqa: E402

from nova_accel import naming  # noqa: E402
from nova_accel.scheduler import filters  # noqa: E402
from nova_accel.scheduler import scheduling  # noqa: E402
from nova_accel.scheduler import weights  # noqa: E402

CONF = nova.conf.CONF
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
REGIONS = 4
#: functions in the fleet: the first is on one region of ten, the others share
#: what is left, and every fourth region is empty
FUNCTIONS = [uuid.uuid5(uuid.NAMESPACE_DNS, f'function{n}').hex
             for n in range(20)]
#: hosts, and how many candidates Placement is asked for ([scheduler]
#: max_placement_results, 1,000 by default); in one of each of so many hosts
#: the candidates are, as Placement's option to randomize leaves them
SIZES = ((250, 1000), (1000, 4000), (4000, 16000), (10000, 1000))


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


def answer(hosts, limit, wanted):
    """[allocation requests, provider summaries] of Placement, as JSON."""
    offered = [(root, region) for root, regions in hosts
               for region, _ in regions] if wanted else [
        (root, None) for root, _ in hosts]
    chance = random.Random(0)
    if limit < len(offered):
        offered = chance.sample(offered, limit)
    requests = []
    for root, region in offered:
        allocations = {root: {'resources': {'VCPU': 1, 'MEMORY_MB': 64}}}
        mappings = {'': [root]}
        if region:
            allocations[region] = {'resources': {FPGA: 1}}
            mappings['_ACCEL0'] = [region]
        requests.append({'allocations': allocations, 'mappings': mappings})
    there = {root for root, _ in offered}
    return json.dumps([requests, {
        rp: summary for root, regions in hosts if root in there
        for rp, summary in tree(root, regions)}])


def tree(root, regions):
    """The provider summaries of a host: root, a device for each region."""
    yield root, summary(root, None, ['COMPUTE_NODE', 'HW_CPU_X86_AVX2'] + [
        f'COMPUTE_TRAIT_{n}' for n in range(30)],
        VCPU=(128, 4), MEMORY_MB=(65536, 1024), DISK_GB=(1000, 10))
    for region, function in regions:
        device = f'{region}-device'
        fixed = ['CUSTOM_FPGA_INTEL', 'CUSTOM_FPGA_INTEL_PAC_ARRIA10',
                 'OWNER_CYBORG']
        yield device, summary(root, root, fixed)
        carried = [naming.PROGRAMMABLE]
        if function:
            spelled = naming.function_trait(function)
            carried += [spelled, spelled.replace('FPGA_', 'FPGA_INTEL_'),
                        spelled.replace('FUNCTION_', 'FUNCTION_INTEL_')]
        yield region, summary(root, device, fixed + carried, **{FPGA: (1, 0)})


def summary(root, parent, traits, **resources):
    return {'root_provider_uuid': root, 'parent_provider_uuid': parent,
            'traits': traits, 'resources': {
                name: {'capacity': capacity, 'used': used}
                for name, (capacity, used) in resources.items()}}


def states(hosts):
    """HostStates, as HostManager has them of the cells."""
    result = []
    for number, (root, regions) in enumerate(hosts):
        state = host_manager.HostState(f'host{number}', f'host{number}',
                                       'cell')
        state.update(compute=objects.ComputeNode(
            uuid=root, memory_mb=65536, free_ram_mb=65536 - number,
            vcpus=32, vcpus_used=number % 32, local_gb=1000, local_gb_used=0,
            free_disk_gb=1000, disk_available_least=None, numa_topology=None,
            pci_device_pools=None, host_ip='192.0.2.1', metrics=None,
            hypervisor_type='QEMU', hypervisor_version=8000000,
            stats={'nova_accel': '1'},
            hypervisor_hostname=f'host{number}', cpu_info='', updated_at=None,
            supported_hv_specs=[], cpu_allocation_ratio=4.0,
            ram_allocation_ratio=1.0, disk_allocation_ratio=1.0))
        state.service = {'disabled': False, 'binary': 'nova-compute',
                         'last_seen_up': datetime.datetime.now(datetime.UTC)}
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


def by_host(state, requests, kind=list):
    """As SchedulerManager ties the candidates to the hosts (31 to 34).

    :param kind: of the lists that it copies.
    """
    found = collections.defaultdict(list)
    for request in requests:
        for provider in request['allocations']:
            found[provider].append(request)
    # as nova_accel.scheduler.filters, which is shown the answer
    if kind is not list:
        for provider, listed in found.items():
            found[provider] = kind(listed)
    for host in state:
        host.allocation_candidates = copy.deepcopy(found[host.uuid])


class Bench:

    def __init__(self):
        self.asked = []
        self.stock = [c() for c in nova_weights.all_weighers()]
        self.ours = [*self.stock, weights.AcceleratorWeigher()]
        self.filters = [filters.AcceleratorFilter()]
        enabled = CONF.filter_scheduler.enabled_filters
        self.default_filters = [c() for c in nova_filters.all_filters()
                                if c.__name__ in enabled]
        self.filter_handler = nova_filters.HostFilterHandler()
        self.handler = nova_weights.HostWeightHandler()

    def get(self, url, version):
        self.asked.append(url)

    def of_both(self, wanted, state, text):
        """What every scheduling does, as Nova does it."""
        answer = json.loads(text)
        left = self.filter_handler.get_filtered_objects(
            self.default_filters, state, wanted)
        return list(left), *answer

    def without(self, wanted, state, requests, summaries):
        by_host(state, requests)
        self.handler.get_weighed_objects(self.stock, state, wanted)

    def with_ours(self, wanted, state, requests, summaries):
        by_host(state, requests, filters.Listed)
        # as nova_accel.scheduler.seam
        filters.SCHEDULINGS.begin(wanted, summaries)
        state = self.filter_handler.get_filtered_objects(
            self.filters, state, wanted)
        self.handler.get_weighed_objects(self.ours, state, wanted)

    def measure(self, function, hosts, limit, rounds):
        """(hosts, candidates, [(ms, ms of all) without, the same with] of each
        round)."""
        text = answer(hosts, limit, function)
        requests, summaries = json.loads(text)
        there = [host for host in hosts if host[0] in summaries]
        filters.SCHEDULINGS = scheduling.Schedulings(self.get)
        # what was asked for before
        asked = random.Random(0).choices(FUNCTIONS, range(1, 21), k=100)
        for number, past in enumerate(asked):
            begun = filters.SCHEDULINGS.begin(spec(past), {})
            begun.count(str(number))
        times = {self.without: [], self.with_ours: []}
        self.asked.clear()
        # the first round warms up Python, too
        for number in range(rounds + 1):
            for run in (times if number % 2 else reversed(times)):
                wanted, state = spec(function), states(there)
                gc.collect()
                # nova-scheduler has no fleet of a benchmark to look through
                gc.freeze()
                start = time.process_time()
                found = self.of_both(wanted, state, text)
                begun = time.process_time()
                run(wanted, *found)
                end = time.process_time()
                times[run].append((1000 * (end - begun), 1000 * (end - start)))
                gc.unfreeze()
                assert len(found[0]) == len(there)
        return len(there), len(requests), list(zip(*(
            found[1:] for found in times.values())))


def medians(rounds):
    """Medians of: ms without and with, their ratio, the ratio of all."""
    return map(statistics.median, zip(*(
        (without, ours, ours / without, all_ours / all_without)
        for (without, all_without), (ours, all_ours) in rounds)))


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    sizes = SIZES[:int(sys.argv[2])] if len(sys.argv) > 2 else SIZES
    objects.register_all()
    bench = Bench()
    cases = [('no accelerator', None),
             ('function on 1 region of 10', FUNCTIONS[0]),
             ('function nowhere', uuid.uuid4().hex)]
    print(f'{REGIONS} regions in each host, {len(FUNCTIONS)} functions in the '
          f'fleet; medians of {rounds} schedulings')
    print(f'{"flavor":27} {"hosts":>6} {"in answer":>9} {"candidates":>10} '
          f'{"requests":>8} {"without, ms":>11} {"with, ms":>8} {"ratio":>6} '
          f'{"of all":>6} {"ours, us each":>13}')
    for count, limit in sizes:
        hosts = fleet(count)
        for name, function in cases:
            there, offered, times = bench.measure(
                function, hosts, limit, rounds)
            without, ours, ratio, of_all = medians(times)
            print(f'{name:27} {count:6} {there:9} {offered:10} '
                  f'{len(bench.asked):8} {without:11.1f} {ours:8.1f} '
                  f'{ratio:6.2f} {of_all:6.2f} '
                  f'{1000 * (ours - without) / offered:13.1f}', flush=True)


if __name__ == '__main__':
    main()
