# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Each call that leaves nova-compute fails, in each operation.

The operations, and what must be true afterwards, are those of
tests.host.killed_kinds; nova-compute keeps running. The everyday run has some
of the faults, always the same ones. In the environment:

NOVA_ACCEL_FAULTS
    all, for ``make faults``, or the name of a call.
"""

import collections
import os
import random
import sys
import time

import fixtures

from tests.host import faults
from tests.host import killed_kinds
from tests.host.killed_operations import SERVER
from tests.host import world

CHOSEN = os.environ.get('NOVA_ACCEL_FAULTS', '')
#: of an operation each day
EVERYDAY = 2
#: seconds within which an operation ends, whatever hangs
LONGEST = 30
#: [accel] options of the processes
LIMITS = {'device_timeout': 1, 'programming_timeout': 2,
          'discovery_timeout': 1}


class _Faults:
    """Has each call fail in place of being killed after it."""

    LIMIT = 7200 if CHOSEN else 300

    def set_up_host(self):
        super().set_up_host()
        self.compute.options.update(LIMITS)

    def at_each_point(self, begin, steps, after, most=None,
                      of_the_start=False):
        if of_the_start:
            # Nova's process ends where that is refused
            return self.skipTest('nova-compute does not start with a fault')
        begin()
        said, calls = self.compute.fail(steps(), None)
        self.assertEqual([], list(filter(None, said)))
        after()
        self.assertNothingLeft()
        counted, bad = collections.Counter(), []
        for fault in self.chosen(list(faults.of_calls(calls))):
            began = time.monotonic()
            try:
                begin()
                self.check(self.compute.fail(steps(), fault)[0])
                self.assertLess(time.monotonic() - began, LONGEST)
                self.compute.run([['minute_passes']])
                after()
                self.assertNothingLeft()
            except Exception as error:
                bad.append(f'{fault}: {error}')
                if not CHOSEN:
                    break
                self.start_again()
            counted[fault.how] += 1
        if CHOSEN:
            print(self.id().partition('test_faults.')[2], dict(counted),
                  f'{len(bad)} bad', file=sys.__stderr__, flush=True)
        self.assertEqual([], bad, '\n\n'.join(bad))
        return sum(calls.values())

    def chosen(self, found):
        if CHOSEN == 'all':
            return found
        if CHOSEN:
            return [fault for fault in found if CHOSEN in fault.call]
        return random.Random(self.id()).sample(
            found, min(EVERYDAY, len(found)))

    def check(self, said):
        for sentence in filter(None, said):
            world.check_sentence(sentence)

    def start_again(self):
        """A new host, after a fault that has left something."""
        self.compute.end()
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.set_up_host()


#: which are killed only: what runs is a start, or a process of their own
_OTHERS = {'MailboxTest', 'HangingSanitizeTest', 'LostStoreTest',
           'OlderCopyTest'}
#: whose kinds of devices fail each day
_EVERYDAY = {'FpgaTest', 'TenantsImageTest', 'DiskTest', 'VgpuTest',
             'ResetTest', 'OneTimeUseTest'}
globals().update(
    (name, test) for name, test in killed_kinds.tests_of(
        __name__, _Faults, without=_OTHERS).items()
    if CHOSEN or name in _EVERYDAY)


class FpgaTest(FpgaTest):  # noqa: F821

    test_sigterm = None

    def test_orders(self):
        """What a failed programming leaves is cleared by an image."""
        self.host.upload(world.BLANK, world.CLEARS)
        super().test_orders()

    def test_runtime_programming(self):
        """What fails is not tried again: its owner reads why, and reboots the
        server."""
        def begin():
            self.booted()
            self.compute.run([
                ['ten_minutes_pass'], ['ask', SERVER, self.other]])

        def after():
            self.compute.run([['reconcile'], ['reboot', SERVER]])
            self.assertHolds()
            self.delete()
        self.at_each_point(begin, lambda: [['run_runtime']], after)


class OneTimeUseTest(OneTimeUseTest):  # noqa: F821

    def check_journal(self):
        """A hand-over that cannot be written is logged, and stops nothing."""
