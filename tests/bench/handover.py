# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the hand-over of an FPGA region costs a delete and the next boot.

Real nova-api, conductor, scheduler, nova-compute, Placement and Glance on one
simulated host (tests.functional.base) with one card, whose region carries the
operator's function. A server is deleted, and the next one is asked for at
once, by turns under each policy of ``[accel] handover``: "none", which does
nothing with the region, "reset" of its port, and "clear", the default, which
programs the region with the same image again. Run with ``python -m
tests.bench.handover [rounds] [seconds of a programming]``.

"delete" and "boot" are seconds from the request to the API until the server is
gone or ACTIVE. "boot later" is a boot when the region is clean already.
Programmings are counted from a delete to the end of the next boot. Compare a
boot that waits for the region with one that programs elsewhere: that takes a
"boot later" and the seconds of a programming.
"""

import statistics
import sys
import time

from tests.bench import boot
from tests.functional import base

from nova_accel import sim  # noqa: I100 (base chooses the threading)

POLICIES = ('none', 'reset', 'clear')
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0


class Handovers(base.AcceleratorTestBase):

    FRESH_CLOUD = True
    HOSTS = {'compute1': {'cards': [base.card(
        '0000:5e:00.0', programming_seconds=SECONDS)]}}

    def setUp(self):
        super().setUp()
        self.programmings = 0
        program = sim.SimulatedKernel.program_dfl_port

        def counted(*args, **kwargs):
            self.programmings += 1
            return program(*args, **kwargs)
        self.patch(sim.SimulatedKernel, 'program_dfl_port', counted)

    def runTest(self):
        self.upload_bitstream(base.CRYPTO)
        flavor = self._create_flavor(
            extra_spec=base.fpga_flavor(function_id=base.CRYPTO))
        results = {policy: [] for policy in POLICIES}
        self.boot_now(flavor)
        for number in range(ROUNDS + 1):
            for policy, found in results.items():
                self.flags(handover=[policy], group='accel')
                result = self.measure(flavor)
                # the first ones also warm up Python
                if number:
                    found.append(result)
        show(results)

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

    def measure(self, flavor):
        """(delete, boot, boot later, programmings)"""
        before = self.programmings
        delete, at_once = self.delete_now(), self.boot_now(flavor)
        programmings = self.programmings - before
        self.delete_now()
        # once the region is clean
        self.assertEqual([], self.claims())
        return delete, at_once, self.boot_now(flavor), programmings


def show(results):
    print(f'median of {ROUNDS} rounds each, a programming of {SECONDS} s\n'
          f'{"policy":10}{"delete, s":>12}{"boot, s":>12}{"later, s":>12}'
          f'{"boot : later":>14}{"programmings":>14}', file=boot.OUT)
    for policy, found in results.items():
        delete, at_once, later, programmings = map(
            statistics.median, zip(*found, strict=True))
        print(f'{policy:10}{delete:12.2f}{at_once:12.2f}{later:12.2f}'
              f'{at_once / later:14.2f}{programmings:14.0f}', file=boot.OUT)


if __name__ == '__main__':
    boot.main(Handovers)
