# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What every change has to pass; .ci/run starts it.

The parts of the README's test command, the other functional tests, a part of
Nova's own tests, two layouts of packages, nova-compute killed, and stopped ten
times, the pages, the demo, each benchmark at its least size, a part of the
tests with another release of Nova, as many trials of the lab as an hour
allows, and a part of Tempest. A step that passes is one line; of one that
fails what went wrong is printed. The last lines say what was done, and the
very last one counts it.

The parts run two at a time. Each of them waits for its own disks, sleeps and
last processes, and what it leaves of the processors the other one takes.
``python -m tests.ci --parts .venv``, which is ``make test``, runs no more than
them.
"""

import argparse
from concurrent import futures
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests import pages_in_browser

ROOT = pathlib.Path(__file__).parents[1]
#: takes longer than all others: it begins first
LONGEST = 'functional'
#: parts of which failed tests are run again
TIERS = 'unit', 'host', 'functional', 'functional-rest', 'functional-part'
#: tests that may pass only the second time
UNSTEADY = 1
#: minutes after which the other release of Nova is not begun, the lab is not
#: built, no trial is begun, Tempest is not begun, and nothing runs any more
OTHER, LAB, TRIALS, TEMPEST, END = 35, 38, 52, 62, 80
#: errors of a failed test in the summary, and characters of a line there
_ERRORS, _WIDE = 3, 400
#: tests.lab.UNFIT
UNFIT = 69
#: of stestr, and of tests.nova
_PASSED = re.compile(r'^ - Passed: (\d+)|: (\d+) passed, \d+ failed', re.M)
_FAILED = re.compile(r'^ - Failed: (\d+)|: \d+ passed, (\d+) failed', re.M)
_SKIPPED = re.compile(r'^ - Skipped: (\d+)| failed, (\d+) skipped', re.M)
#: of testtools.run, which does not tell what it skips
_RAN = re.compile(r'^Ran (\d+) tests? in ', re.M)
_BROKEN = re.compile(r'^FAILED \(failures=(\d+)\)', re.M)
_TRIAL = re.compile(r'^(proven|FAILED|skipped|not run) +\d+  ', re.M)
#: what stestr prints of a failed test, and the last line of a traceback
_TEST = re.compile(r'^(tests\.\S+)\n-+\n', re.M)
_RAISED = re.compile(r'^ {0,4}([\w.]*(?:Error|Exception|Mismatch|Timeout)\w*'
                     r'(?:: .*)?)$', re.M)
_LOGGED = re.compile(r'^.* ERROR .*$', re.M)
_DIED = re.compile('without returning a status|process-returncode|'
                   r'subunit\.parser')


@dataclasses.dataclass
class Step:
    """A command that was run, or the reason why it was not."""

    name: str
    status: int | None = None
    seconds: float = 0
    output: str = ''
    why: str = ''

    def _count(self, pattern):
        return sum(int(next(filter(None, found.groups())))
                   for found in pattern.finditer(self.output))

    @property
    def passed(self) -> int:
        """Tests; of a step without tests the step itself."""
        if not any(pattern.search(self.output)
                   for pattern in (_TRIAL, _PASSED, _RAN)):
            return int(self.status == 0)
        return (_TRIAL.findall(self.output).count('proven')
                + self._count(_PASSED) + self._count(_RAN)
                - self._count(_BROKEN))

    @property
    def failed(self) -> int:
        return (_TRIAL.findall(self.output).count('FAILED')
                + self._count(_FAILED) + self._count(_BROKEN)
                or int(self.status not in (0, None)))

    @property
    def reasons(self) -> list[str]:
        """A line for each failed test, and the errors that it logged; without
        tests, the last lines. A CI may print the two ends of a long run only,
        and the tracebacks are in the middle."""
        if not self.status:
            return []
        tests = _TEST.split(_told(self.output))[1:]
        lines = []
        for test, details in zip(tests[::2], tests[1::2], strict=True):
            _, _, traceback = details.partition('Captured traceback:')
            raised = _RAISED.findall(traceback.partition('\nCaptured ')[0])
            lines.append(f'{test}: {raised[-1] if raised else "?"}')
            lines += dict.fromkeys(_LOGGED.findall(details)[:_ERRORS])
        return [line[:_WIDE] for line in
                lines or self.output.splitlines()[-_ERRORS:]]

    def __str__(self):
        if self.status is None:
            return f'not run: {self.name}: {self.why}'
        trials = _TRIAL.findall(self.output)
        about = [f'{n} {what}' for what, n in (
            ('trials not begun', trials.count('not run')),
            ('skipped', trials.count('skipped') + self._count(_SKIPPED)),
        ) if n]
        return (f'{"passed" if self.status == 0 else "FAILED"} in '
                f'{self.seconds:4.0f} s: {self.name}: {self.passed} passed, '
                f'{self.failed} failed' + ''.join(f', {a}' for a in about))


class Run:

    def __init__(self, root: pathlib.Path = ROOT):
        self._root = root
        self._began = time.monotonic()
        self.steps: list[Step] = []
        #: tests that failed, and passed when they were run again
        self.unsteady: list[str] = []
        #: what runs now, and whether anything more may begin
        self._running: set[subprocess.Popen] = set()
        self._interrupted = False

    def minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    def has_failed(self) -> bool:
        return (any(step.status for step in self.steps)
                or len(self.unsteady) > UNSTEADY)

    def step(self, name: str, *command: str, limit: float,
             keep: bool = True) -> Step:
        """Run a command, and say how it ended.

        :param limit: minutes; its status is 124 where it takes longer.
        :param keep: what it did is told in the end.
        """
        began = time.monotonic()
        limit = max(min(limit, END - self.minutes()), 0.1)
        with tempfile.TemporaryFile('w+', errors='replace') as log:
            with subprocess.Popen(
                    command, cwd=self._root, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True) as process:
                self._running.add(process)
                try:
                    status = process.wait(60 * limit)
                except subprocess.TimeoutExpired:
                    status = 124
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(30)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                self._running.remove(process)
            log.seek(0)
            step = Step(name, status, time.monotonic() - began, log.read())
        if keep:
            self.steps.append(step)
        said = f'{step} [{" ".join(command)}]\n'
        if status:
            after = (f', after {limit:.0f} minutes, its limit'
                     if status == 124 else '')
            said += (f'It ended with {status}{after}. What it said:\n'
                     f'{_told(step.output)}\n')
        # at once: another step may run beside it
        sys.stdout.write(said)
        sys.stdout.flush()
        return step

    def skip(self, name: str, why: str) -> None:
        self.steps.append(Step(name, why=why))
        print(self.steps[-1], flush=True)

    def parts(self, venv: str = '.venv') -> None:
        """Run the parts, two at a time.

        :param venv: which make uses.
        """
        if self.step('packages', 'make', f'{venv}/stamp', limit=15).status:
            return
        names = subprocess.check_output(
            ['make', '-s', 'parts'], cwd=self._root, text=True).split()
        names.sort(key=LONGEST.__ne__)
        print(f'Two at a time: {", ".join(names)}', flush=True)
        with futures.ThreadPoolExecutor(2) as pool:
            try:
                for ended in [pool.submit(self.part, name, venv=venv)
                              for name in names]:
                    ended.result()
            except KeyboardInterrupt:
                self._interrupted = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    os.killpg(process.pid, signal.SIGTERM)
                raise

    def part(self, target: str, *variables: str, venv: str = '.venv',
             limit: float = 40) -> None:
        """Make a part. What failed beside other tests is run again by itself:
        whether it fails at all, or only in company.

        Where a process of tests ended, it is unknown what it has not run: all
        are run again.
        """
        name = ' '.join((target, *variables))
        step = self.step(name, 'make', target, *variables, limit=limit)
        if (step.status in (0, 124) or target not in TIERS
                or self._interrupted):
            return
        failed = self._failing(target, venv)
        if _DIED.search(step.output):
            failed.append(f'a process of {name}, which died')
            again = self.step(f'{name}, again', 'make', target, *variables,
                              limit=limit, keep=False)
        elif failed:
            again = self.step(
                f'{name}, what failed', 'make', target, *variables,
                'STESTR=--failing --serial', limit=15, keep=False)
        else:
            return
        if again.status == 0 and again.passed:
            self.unsteady += failed
            # as it is after the second run
            step.status = 0
            step.output = f' - Passed: {step.passed + step.failed}\n'

    def _failing(self, target, venv):
        tier = target.partition('-')[0]
        listed = subprocess.run(
            [f'{venv}/bin/stestr', '--test-path', f'./tests/{tier}',
             '--top-dir', '.', '--repo-url', f'build/stestr/{tier}',
             'failing', '--list'], cwd=self._root,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return [line.strip() for line in listed.stdout.splitlines()
                if line.startswith('tests.')]

    def other_nova(self) -> None:
        """A part of the tests with one of the other releases of Nova, each
        day another one, and unit and host tests with the oldest."""
        release = other_releases(self._root)[
            int(time.time() // 86400) % len(other_releases(self._root))]
        name = f'Nova {release}'
        if not self._begins(name, OTHER):
            return
        venv = f'.venv{release.partition(".")[0]}'
        variables = f'NOVA={release}', f'VENV={venv}'
        ready = self.step(f'{name}, its packages', 'make', f'{venv}/stamp',
                          *variables, limit=6, keep=False)
        if ready.status:
            self.skip(name, 'its packages could not be installed, see above')
            return
        # the tiers below meet nothing of Nova but its signatures, which they
        # compare for all releases
        self.part('functional-part', *variables, venv=venv, limit=15)
        # and with the libraries of the oldest one
        self.part('floor', limit=20)

    def programs(self, venv: str) -> None:
        """Tests that were skipped without programs of the distribution, where
        these can be had now."""
        name = 'tests with Prometheus and a browser'
        if all(map(shutil.which, ('prometheus', 'chromium'))):
            # they were not skipped
            return
        if os.geteuid() or not shutil.which('apt-get'):
            return self.skip(name, 'the programs are not installed, see '
                                   'bindep.txt')
        self.step(f'{name}, the programs', 'sh', '-c', 'apt-get update -qq && '
                  'apt-get install -y -qq --no-install-recommends chromium '
                  'prometheus prometheus-node-exporter', limit=6, keep=False)
        if not all(map(shutil.which, ('prometheus', 'chromium'))):
            return self.skip(name, 'their packages could not be installed, '
                                   'see above')
        self.step(name, f'{venv}/bin/python', '-m', 'testtools.run',
                  'tests.host.test_metrics', 'tests.unit.test_cmd_page',
                  limit=4)

    def pages(self) -> None:
        """The pages and the demo's in a browser, where there is one."""
        name = 'pages in a browser'
        looked = self.step(name, sys.executable, '-m',
                           'tests.pages_in_browser', 'docs/build/html',
                           'build/demo.html', 'build/accelerators.html',
                           limit=6, keep=False)
        if looked.status == pages_in_browser.UNFIT:
            return self.skip(name, looked.output.strip())
        self.steps.append(looked)

    def lab(self) -> None:
        name = 'lab'
        takes = ', and it takes up to 18 to begin'
        if self._begins(name, LAB, takes) and (
                self._build(name, 'tests.lab', 12)):
            self.step(
                name, sys.executable, '-m', 'tests.lab', 'prove', '--within',
                str(max(1, int(TRIALS - self.minutes()))),
                limit=TRIALS + 15 - self.minutes())

    def tempest(self) -> None:
        name = 'tempest-part'
        takes = f', and it takes up to {END - TEMPEST}'
        if self._begins(name, TEMPEST, takes) and (
                self._build(name, 'tests.tempest', 5)):
            self.step(name, 'make', name, limit=END)

    def _begins(self, name: str, most: int, takes: str = '') -> bool:
        """Return whether a step may begin, and skip it otherwise.

        :param most: minutes after which it is not begun, and takes: the reason.
        """
        if self.has_failed():
            self.skip(name, 'something has failed before')
        elif self.minutes() > most:
            self.skip(name, f'{self.minutes():.0f} minutes were over{takes}')
        else:
            return True
        return False

    def _build(self, name: str, module: str, limit: int) -> bool:
        """Make what the lab or Tempest runs in; whether it is there."""
        built = self.step(f'{name}, its build', sys.executable, '-m', module,
                          'build', limit=limit, keep=False)
        if built.status == UNFIT:
            self.skip(name, ' '.join(built.output.split()[-60:]))
        elif built.status == 124:
            self.skip(name, f'its packages did not arrive in {limit} minutes')
        elif built.status:
            self.steps.append(built)
        return not built.status

    def summary(self) -> str:
        """What was done; the last line counts tests, trials, and steps that
        have neither."""
        lines = ['', f'In {self.minutes():.0f} minutes:']
        lines += map(str, self.steps)
        lines += [f'unsteady: {test} failed, and passed the second time'
                  for test in self.unsteady]
        if len(self.unsteady) > UNSTEADY:
            lines.append(f'FAILED: {len(self.unsteady)} tests passed only the '
                         f'second time; at most {UNSTEADY} may.')
        for step in self.steps:
            lines += [f'{step.name}: {reason}' for reason in step.reasons]
        failed = sum(step.failed for step in self.steps)
        if len(self.unsteady) > UNSTEADY:
            failed += len(self.unsteady)
        passed = sum(step.passed for step in self.steps)
        return '\n'.join([*lines, f'{passed} passed, {failed} failed'])


def other_releases(root: pathlib.Path = ROOT) -> list[str]:
    """The releases of Nova in tox.ini that make does not take by itself."""
    default = re.search(r'^NOVA \?= (\S+)', (root / 'Makefile').read_text(),
                        re.M)[1]
    return [release for release in re.findall(
        r'nova==(\S+)', (root / 'tox.ini').read_text()) if release != default]


def _told(output):
    """The tests that failed, each with what it said; else the end."""
    lines = output.splitlines()
    begins = [n for n, line in enumerate(lines)
              if re.match(r'Failed \d+ tests? - output below', line)]
    return '\n'.join(lines[begins[-1]:][:600] if begins else lines[-150:])


def main():
    parser = argparse.ArgumentParser(prog='python -m tests.ci')
    parser.add_argument('--parts', metavar='VENV',
                        help='run the parts of make test only, with this '
                             'virtual environment of make')
    venv = parser.parse_args().parts
    run = Run()
    run.parts(venv or '.venv')
    if not venv:
        everything_else(run)
    print(run.summary(), flush=True)
    sys.exit(run.has_failed())


def everything_else(run: Run) -> None:
    """What follows the parts."""
    run.part('functional-rest')
    run.part('nova-tests-part')
    run.step('layouts', '.venv/bin/python', '-m', 'testtools.run',
             'tests.layouts.test_wheel',
             'tests.layouts.test_pip.EditableTest.test_both_at_once', limit=5)
    run.step('killed', 'make', 'killed', limit=10)
    run.step('sigterm', 'make', 'sigterm', 'STOPS=10', limit=10)
    run.step('docs', 'make', 'docs', limit=10)
    run.step('demo', 'make', 'demo', limit=10)
    run.programs('.venv')
    run.pages()
    for name in 'demo', 'demo-gpus':
        run.step(f'picture {name}.svg', 'cmp', f'build/{name}.svg',
                 f'docs/source/{name}.svg', limit=1)
    run.step('bench-part', 'make', 'bench-part', limit=10)
    run.other_nova()
    run.lab()
    run.tempest()


if __name__ == '__main__':
    main()
