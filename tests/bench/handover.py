# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the hand-over of an FPGA region costs a delete and the next boot.

Real nova-api, conductor, scheduler, nova-compute, Placement and Glance on one
simulated host (tests.functional.base), first with one card, then with a second
one that is free and carries another function. The region of the first carries
the operator's function. A server is deleted, and the next one is asked for at
once, by turns under each policy of ``[accel] handover``: "none", which does
nothing with the region, "reset" of its port, and "clear", the default, which
programs the region with the same image again. Run with ``python -m
tests.bench.handover [rounds] [seconds of a programming]``.

"delete" and "boot" are seconds from the request to the API until the server is
gone or ACTIVE. "boot later" is a boot when the region is clean already.
Programmings are counted from a delete to the end of the next boot, and "same
card" says how many of these boots got the card of the server before: where
another card is programmed there is one programming more, and fewer of these.
The same for a GPU that takes as long as a programming to boot and clear its
memory: "reset" is that of the function, and under "clear" and "shown" the end
of the clearing is read.
"elsewhere" is a boot for which the second card is programmed, because the
first is held: what a boot under "clear" must not take longer than.
"""

import statistics
import sys
import time
import unittest

from tests.bench import boot
from tests.functional import base

from nova_accel import sim  # noqa: I100 (base chooses the threading)

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
CLASS = 'CUSTOM_ACCELERATOR_GPU'


FIRST, SECOND = '0000:5e:00.0', '0000:af:00.0'


class Handovers(base.AcceleratorTestBase):

    FRESH_CLOUD = True
    POLICIES = 'none', 'reset', 'clear'
    HOSTS = {'compute1': {'cards': [base.card(
        FIRST, programming_seconds=SECONDS)]}}

    def setUp(self):
        super().setUp()
        self.programmings = 0
        program = sim.SimulatedKernel.program_dfl_port

        def counted(*args, **kwargs):
            self.programmings += 1
            return program(*args, **kwargs)
        self.patch(sim.SimulatedKernel, 'program_dfl_port', counted)
        self.upload_bitstream(base.CRYPTO)

    def runTest(self):
        flavor = self.flavor(base.CRYPTO)
        results = {policy: [] for policy in self.POLICIES}
        self.boot_now(flavor)
        for number in range(ROUNDS + 1):
            for policy, found in results.items():
                self.flags(handover=[policy], group='accel')
                result = self.measure(flavor)
                # the first ones also warm up Python
                if number:
                    found.append(result)
        show(f'{sum(map(len, self.HOSTS["compute1"].values()))} card(s)',
             results)

    def flavor(self, function):
        return self._create_flavor(
            extra_spec=base.fpga_flavor(function_id=function))

    def boot_now(self, flavor):
        start = time.perf_counter()
        self.server = self._create_server(
            flavor_id=flavor, networks='none',
            image_uuid=self.glance.guest_image)
        return time.perf_counter() - start

    def delete_now(self):
        start = time.perf_counter()
        self._delete_server(self.server)
        return time.perf_counter() - start

    def card(self):
        """Address of the card that the server has."""
        claim, = (c for c in self.claims()
                  if c.instance_uuid == self.server['id'])
        return claim.device_address

    def measure(self, flavor):
        """(delete, boot, boot later, programmings, same card)"""
        before, card = self.programmings, self.card()
        delete, at_once = self.delete_now(), self.boot_now(flavor)
        programmings, same = self.programmings - before, self.card() == card
        self.delete_now()
        # once the region is clean
        self.assertEqual([], self.claims())
        return delete, at_once, self.boot_now(flavor), programmings, same


class BesideAnotherCard(Handovers):

    HOSTS = {'compute1': {'cards': [
        base.card(FIRST, programming_seconds=SECONDS),
        base.card(SECOND, [base.NLB3], programming_seconds=SECONDS)]}}

    def runTest(self):
        super().runTest()
        # the last server has a card, and the other one is programmed in turns
        self.flags(handover=['none'], group='accel')
        self.upload_bitstream(base.NLB3)
        flavors = [self.flavor(f) for f in (base.CRYPTO, base.NLB3)]
        found = []
        for _ in range(ROUNDS):
            for flavor in flavors:
                before = self.programmings
                found.append(self.boot_now(flavor))
                self.assertEqual(1, self.programmings - before)
                self.delete_now()
        print(f'elsewhere: {statistics.median(found):.2f} s', file=boot.OUT)


class Gpu(Handovers):

    POLICIES = 'reset', 'clear', 'shown'
    HOSTS = {'compute1': {'gpus': [{
        'address': FIRST, 'reset_method': 'flr bus', 'iommu_group': 7,
        # a clearing that has ended at the first reading is not shown
        'boot_seconds': max(SECONDS, .2) / 2,
        'clear_seconds': max(SECONDS, .2) / 2}]}}

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['gpu'], group='accel')

    def flavor(self, function):
        return self._create_flavor(extra_spec={f'resources1:{CLASS}': '1'})


def show(what, results):
    print(f'{what}, median of {ROUNDS} rounds each, a programming of '
          f'{SECONDS} s\n'
          f'{"policy":10}{"delete, s":>12}{"boot, s":>12}{"later, s":>12}'
          f'{"boot : later":>14}{"programmings":>14}{"same card":>12}',
          file=boot.OUT)
    for policy, found in results.items():
        delete, at_once, later, programmings, _ = map(
            statistics.median, zip(*found, strict=True))
        same = sum(result[-1] for result in found)
        print(f'{policy:10}{delete:12.2f}{at_once:12.2f}{later:12.2f}'
              f'{at_once / later:14.2f}{programmings:14.0f}'
              f'{same:8} of {len(found)}', file=boot.OUT)


if __name__ == '__main__':
    boot.main(lambda: unittest.TestSuite(
        (Handovers(), BesideAnotherCard(), Gpu())))
