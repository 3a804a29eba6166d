# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How many servers fit, against all ways to place them, and in Placement."""

import time

import testtools

from nova_accel import naming
from nova_accel.planning import capacity
from nova_accel import request
from tests.unit.capacity import (
    below, CARRIED, compare, FPGA, FUNCTION, GPU, L40S, node, provider, root,
    wanted)


class CountTest(testtools.TestCase):

    def test_random(self):
        """tests.bench.capacity does this with more of them."""
        self.assertGreater(compare(self, range(120)), 20)

    def count(self, providers, flavor):
        host = capacity.Host(providers)
        return (capacity.count(flavor, host, host.free),
                capacity.limit(flavor, host, host.free).text)

    def test_table(self):
        pools = [provider('n0', [node(0)], **{GPU: 4}),
                 provider('n1', [node(1)], {GPU: 1}, **{GPU: 4})]
        regions = [
            provider('r0', [CARRIED], **{FPGA: 1}),
            provider('r1', [naming.PROGRAMMABLE], **{FPGA: 1}),
            provider('r2', ['CUSTOM_FPGA_INTEL'], **{FPGA: 1})]
        for name, providers, flavor, expected in (
                ('of a pool', [root(), *pools], wanted(gpu1='2'),
                 (3, f'2 {GPU} for each, 7 free of 8')),
                ('processors', [root(vcpus=5), *pools],
                 wanted(vcpus=2, gpu1='1'),
                 (2, '2 VCPU for each, 5 free of 5')),
                ('memory', [root(memory=4095), *pools],
                 wanted(memory=2048, gpu1='1'),
                 (1, '2048 MEMORY_MB for each, 4095 free of 4095')),
                ('two groups', [root(), *pools], wanted(gpu1='1', gpu2='3'),
                 (1, f'3 {GPU} for each, 7 free of 8')),
                ('another provider for each', [root(), *pools],
                 wanted(gpu1='1', gpu2='1', gpu3='1', policy='isolate'),
                 (0, 'another provider for each group '
                     '(group_policy=isolate)')),
                ('on one node', [root(), *pools],
                 wanted(gpu1='2', gpu2='1', numa='required'),
                 (2, f'2 {GPU} for each, 7 free of 8')),
                ('on one node, not on two', [root(), *pools],
                 wanted(gpu1='4', gpu2='2', numa='required'),
                 (0, 'all accelerators on one NUMA node')),
                ('a trait', [root(), *pools], wanted(gpu1='1', t1=L40S),
                 (0, f'1 {GPU} with {L40S} for each, others are free')),
                ('a function', [root(), *regions],
                 wanted(fpga1='1', function1=FUNCTION),
                 (2, f'1 {FPGA} for each, 3 free of 3')),
                ('a region of several, one of which is in use', [
                    root(), provider('r', [naming.PROGRAMMABLE], {FPGA: 1},
                                     **{FPGA: 4})],
                 wanted(fpga1='1', function1=FUNCTION),
                 (0, f'1 {FPGA} with the function for each, others are free')),
                ('more used than there is', [
                    root(), provider('p', used={GPU: 3}, **{GPU: 2})],
                 wanted(gpu1='1'), (0, f'1 {GPU} for each, 0 free of 2')),
                ('a set', [root(), provider('s', **{GPU: (4, 4)})],
                 wanted(gpu1='2'), (0, f'2 {GPU} for each, 4 free of 4')),
                ('no such thing', [root()], wanted(gpu1='1'),
                 (0, f'no {GPU}')),
                ('a trait that the host lacks', [root(), *pools],
                 wanted(gpu1='1', t='CUSTOM_GOLD'),
                 (0, 'no provider has the trait CUSTOM_GOLD'))):
            with self.subTest(name):
                self.assertEqual(expected, self.count(providers, flavor))

    def test_disk_that_hosts_share(self):
        flavor = wanted(gpu1='1')
        plain = flavor.groups['']
        shared = capacity.Wanted({**flavor.groups, '': request.Group(
            {**plain.resources, 'DISK_GB': 20})}, flavor.requests)
        self.assertEqual(4, self.count(
            [root(), provider('p', **{GPU: 4})], shared)[0])

    def test_large_hosts(self):
        """A second for what hosts are made of."""
        start = time.process_time()
        vfs = [provider(f'pool{n}', [node(n % 2)], **{GPU: 64})
               for n in range(4)]
        regions = [provider(f'r{n}', [naming.PROGRAMMABLE, node(n % 2),
                                      below(n)], **{FPGA: 1})
                   for n in range(64)]
        eight = {f'gpu{n}': '1' for n in range(1, 9)}
        for providers, flavor, expected in (
                (vfs, wanted(0, gpu1='1'), 256),
                (vfs, wanted(0, **eight, numa='required'), 32),
                (vfs, wanted(0, gpu1='1', gpu2='2', gpu3='3'), 42),
                (regions, wanted(0, fpga1='1', fpga2='1', fpga3='1',
                                 policy='isolate'), 21),
                (regions, wanted(0, fpga1='1', fpga2='1', fpga3='1',
                                 numa='required'), 20),
                (regions, wanted(0, fpga1='1', fpga2='1', function1=FUNCTION,
                                 policy='isolate'), 32)):
            self.assertEqual(expected, self.count(
                [root(vcpus=999), *providers], flavor)[0])
        self.assertLess(time.process_time() - start, 20)
