# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel usage, as an operator starts it."""

import json
import os

import hypothesis
from hypothesis import strategies

from nova_accel.cmd import usage
from nova_accel import model
from tests.unit import commands
from tests.unit.claims import claim, handle
from tests.unit.clock import Clock

_ROW = ('compute1', 'c', 's', 'p', 'f', 'GPU', 'H200', '',
        '2026-11-22T00:00:00.000000+00:00', '2026-11-22T01:00:00.000000+00:00',
        3600.0)


def row(**changes):
    return {name: value or None for name, value in
            {**dict(zip(usage._CLAIM, _ROW)), **changes}.items()}


class UsageTest(commands.StoreCommandTestCase):

    COMMAND = 'usage'
    COMMANDS = {'usage': usage.Usage}

    def setUp(self):
        super().setUp()
        self.clock = Clock(self)
        self.open_store()
        self.files = 0

    def fill(self):
        """A GPU for 30 hours, and a vGPU for a quarter of an hour."""
        gpu, vgpu = (claim(handle=handle(n), project_id='p', **more)
                     for n, more in enumerate((
                         {'resource_class': 'PGPU', 'product': 'H200',
                          'flavor': 'gpu1'},
                         {'resource_class': 'VGPU', 'product': 'L40S',
                          'created_type': 'nvidia-558', 'flavor': 'v'})))
        self.store.add([gpu, vgpu])
        self.clock.go(900)
        self.store.update([vgpu], state=model.ClaimState.DELETING)
        self.clock.go(30 * 3600 - 900)
        self.store.count_uses()

    def journal(self, rows, name=None):
        """A file of another host, with these rows or this text."""
        self.files += 1
        path = os.path.join(self.directory, name or f'{self.files}.json')
        with open(path, 'w') as file:
            file.write(rows if isinstance(rows, str) else json.dumps(rows))
        return '--journal', path

    def hours(self, *arguments, warns=''):
        result = self.call('-f', 'json', *arguments)
        self.assertEqual(int(bool(warns)), result.returncode, result.stderr)
        self.assertRegex(result.stderr, f'(?s)^WARNING: --journal .*{warns}'
                         if warns else '^$')
        return round(sum(
            found['Hours'] for found in json.loads(result.stdout)), 6)

    def test_days(self):
        self.fill()
        found = self.rows()
        self.assertEqual([
            ('2026-11-22', 'p', 'H200', None, 'gpu1', 24),
            ('2026-11-22', 'p', 'L40S', 'nvidia-558', 'v', .25),
            ('2026-11-23', 'p', 'H200', None, 'gpu1', 6)],
            [tuple(r[name] for name in (
                'Day', 'Project', 'Product', 'Part', 'Flavor', 'Hours'))
             for r in found])

    def test_part_of_it(self):
        self.fill()
        self.assertEqual(6, self.hours('--since', '2026-11-23'))
        self.assertEqual(24.25, self.hours('--until', '2026-11-22'))
        result = self.call('--project', 'q')
        self.assertEqual((0, 'No use of a device is recorded.\n'),
                         (result.returncode, result.stdout))
        self.assertRaises(SystemExit, self.call, '--since', 'Monday')

    def test_table(self):
        self.fill()
        found = self.call().stdout
        self.assertIn('| 2026-11-22 | p                  | ', found)
        self.assertIn('flavor gpu1', found)
        self.assertLess(max(map(len, found.splitlines())), 101)
        self.assertIn('claim ', self.call('--by-claim').stdout)

    def test_files(self):
        """What a host exports is what another command counts."""
        self.fill()
        exported = self.call('--by-claim', '-f', 'json').stdout
        self.assertEqual(30.25, self.hours(*self.journal(exported)))
        both = (*self.journal(exported), *self.journal(
            [row(Host='compute2')]))
        self.assertEqual(31.25, self.hours(*both))

    def test_two_hosts_with_one_name(self):
        """Their claims are different, and count."""
        self.assertEqual(2, self.hours(
            *self.journal([row()]), *self.journal([row(Claim='d')]),
            warns='is of host compute1, as .*1.json is: each claim counts '
                  'once; if two hosts have this name, rename one'))

    def test_one_host_twice(self):
        """The later reading counts, in either order."""
        early, late = self.journal([row(Seconds=1800.0)]), self.journal([row()])
        for files in (*early, *late), (*late, *early):
            self.assertEqual(1, self.hours(*files, warns='counts once'))

    def test_clock_that_was_set(self):
        """Seconds are of another clock: they count."""
        back = row(Until='2026-11-21T23:00:00.000000+00:00')
        self.assertEqual(1, self.hours(
            *self.journal([back]),
            warns='has 1 uses during which the clock of the host was set'))
        self.assertEqual(1, self.hours(
            *self.journal([row(Until='2026-11-25T00:00:00+00:00')]),
            warns='was set'))

    def test_cut_off(self):
        """At any character: what is whole before it counts."""
        content = json.dumps([row(Claim=str(n)) for n in range(3)], indent=1)
        for end in range(0, len(content) - 1, 7):
            whole = content[:end].count('}')
            self.assertEqual(whole, self.hours(
                *self.journal(content[:end], 'cut.json'),
                warns=f'is not complete: the {whole} rows up to its damage '
                      f'count'))

    def test_other_rows(self):
        """Each is left out, and the others count."""
        odd = [row(Seconds='x'), row(Seconds=float('nan')), row(Seconds=-1.0),
               row(Seconds=True), row(Since='yesterday'), row(Project=7),
               row(Until='2026-11-22T01:00:00'), {}, [], 'x', None, 7,
               row(Until='9026-11-22T01:00:00+00:00'), row(Seconds=10 ** 400)]
        self.assertEqual(1, self.hours(
            *self.journal([*odd, row()]),
            warns=f'has {len(odd)} rows that nova-accel usage --by-claim has '
                  f'not written: they are left out'))
        for other in '{}', '7', '[' * 100_000, '\0', 'null':
            self.assertEqual(0, self.hours(
                *self.journal(other, 'odd.json'), warns='is not complete'))

    def test_no_file(self):
        self.assertEqual(1, self.hours(
            '--journal', f'{self.directory}/none', *self.journal([row()]),
            warns='none cannot be read: No such file'))

    def test_names_of_users(self):
        self.assertNotIn('\033', self.call(*self.journal([
            row(Host='\033[2J'), row(Host='\033[2J', Claim='d')]),
            *self.journal([row(Host='\033[2J')])).stderr)

    @hypothesis.given(strategies.datetimes(
        timezones=strategies.just(usage.datetime.UTC),
        min_value=usage.datetime.datetime(2020, 1, 1),
        max_value=usage.datetime.datetime(2040, 1, 1)),
        strategies.floats(-1e6, 1e7), strategies.floats(0, 1e7))
    def test_days_are_all(self, since, length, seconds):
        use = usage.Use(*_ROW[:8], since.isoformat(), (
            since + usage.datetime.timedelta(seconds=length)).isoformat(),
            seconds)
        found = [*use.days()]
        self.assertAlmostEqual(seconds, sum(s for _, s in found), 3)
        self.assertEqual(sorted({day for day, _ in found}),
                         [day for day, _ in found])
        if abs(length - seconds) < 1e-9:
            self.assertLessEqual(max(s for _, s in found), 86400.001)
