# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which results of a suite are wrong."""

import re

from tests.nova import suites as lists
from tests.tempest import suites


def faults(name: str, tests: dict, wanted: list[str], whole: bool
           ) -> list[str]:
    """Return what is wrong with the results of a suite.

    :param wanted: patterns; for each a test has to run.
    :param whole: all tests of the suite ran.
    """
    permitted = lists.exclusions(name, suites.PERMITTED, suites.SUITES)
    ran = [test for test, result in tests.items()
           if result['status'] != 'skip']
    found = [f'{pattern} runs no test' for pattern in wanted
             if not any(re.search(pattern, test) for test in ran)]
    found += [f'{p.pattern.pattern} of permitted.txt finds no test'
              for p in permitted if whole and not any(map(
                  p.pattern.search, tests))]
    for test, result in sorted(tests.items()):
        allowed = any(p.pattern.search(test) for p in permitted)
        status = result['status']
        if status == 'success' and allowed:
            found.append(f'{test} passes, and permitted.txt has it')
        elif status not in ('success', 'skip') and not allowed:
            found.append(f'{test} failed ({status}): {reason(result)}')
    return found


def reason(result) -> str:
    """Return the last line of a traceback."""
    texts = [detail.as_text() for name, detail in result['details'].items()
             if name.startswith('traceback')]
    lines = ''.join(texts).strip().splitlines()
    return lines[-1][:300] if lines else '?'
