# Licensed under the Apache License, Version 2.0. See LICENSE.
"""python -m tests.lab.trials [NAME...]: those whose name has one of the words.

Ends with a table of what was proven.
"""

import fcntl
import os
import sys
import textwrap
import time
import traceback
import unittest

from tests.lab import machine
from tests.lab import processes
from tests.lab.trials import boot
from tests.lab.trials import computes
from tests.lab.trials import desk
from tests.lab.trials import drivers
from tests.lab.trials import firmware
from tests.lab.trials import handover
from tests.lab.trials import health
from tests.lab.trials import host
from tests.lab.trials import kinds
from tests.lab.trials import operations
from tests.lab.trials import pools
from tests.lab.trials import refusals
from tests.lab.trials import topology

# where time ends before them, those that take long are the ones not run
MODULES = (boot, handover, refusals, firmware, kinds, pools, topology, desk,
           host, health, operations, computes, drivers)


class Table(unittest.TestResult):

    def __init__(self):
        super().__init__()
        self.rows = []

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()
        self.outcome = 'proven'
        print(f'{test.id().removeprefix("tests.lab.trials.")}\n'
              f'    {test.shortDescription()}', flush=True)

    def stopTest(self, test):
        super().stopTest(test)
        seconds = time.monotonic() - self.began
        self.rows.append((self.outcome, seconds, test.shortDescription()))
        print(f'    {self.outcome} in {seconds:.0f} s', flush=True)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.outcome = 'skipped'
        print(f'    {reason}')

    def addError(self, test, error):
        super().addError(test, error)
        self.outcome = 'FAILED'
        text = ''.join(traceback.format_exception(*error))
        log = machine.run('grep -E " (ERROR|CRITICAL) " '
                          '/var/log/nova-compute.log | tail -n 30', 60)[1]
        print(textwrap.indent(
            f'{text}\nerrors in nova-compute.log end with\n{log}', '    '),
            flush=True)

    addFailure = addError

    def show(self):
        print(f'\n{"outcome":8} {"seconds":>7}  what')
        for outcome, seconds, what in self.rows:
            print(f'{outcome:8} {seconds:7.0f}  {what}')


def main(words):
    trials, table = [], Table()
    for module in MODULES:
        for case in unittest.defaultTestLoader.loadTestsFromModule(module):
            for test in case:
                name = test.id().lower()
                if not words or any(w.lower() in name for w in words):
                    trials.append(test)
    if not trials:
        sys.exit(f'No trial has {" or ".join(words)} in its name.')
    lock = open(processes.RUN / 'trials.lock', 'w')
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit('Trials are running in this lab already, and each needs it '
                 'for itself: wait for their end.')
    end = float(os.environ.get('LAB_END', 'inf'))
    for test in trials:
        if time.time() < end:
            test.run(table)
        else:
            table.rows.append(('not run', 0, test.shortDescription()))
    table.show()
    return not table.wasSuccessful()


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
