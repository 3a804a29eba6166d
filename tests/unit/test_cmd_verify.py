# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel verify: the chain of hand-overs, and all ways to break it."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sqlite3
from unittest import mock

import ddt
import hypothesis
from hypothesis import strategies

from nova_accel.store import chain
from nova_accel.store import claim_store
from nova_accel.store import journal
from nova_accel.store import keys
from tests.unit import commands
from tests.unit.handovers import A, B, handover

CRYPTO = '6d8bfe68423348798b35308fa443d59d'


class VerifyTestCase(commands.StoreCommandTestCase):

    COMMAND = 'verify'

    def setUp(self):
        super().setUp()
        self.open_store()
        self.key = keys.create(self.path + keys.SUFFIX)
        self.store.sign_with(self.key)

    def fill(self, *numbers, **more):
        for number in numbers:
            self.store.add_handover(handover(number, **more))

    def export(self, name='journal.json', *arguments):
        """What the command prints, as an operator redirects it."""
        result = self.main('handovers', '--config-file', self.config, '-f',
                           'json', *arguments)
        self.assertEqual(0, result.returncode, result.stderr)
        return self.write(json.loads(result.stdout), name)

    def write(self, rows, name='journal.json'):
        path = os.path.join(self.directory, name)
        with open(path, 'w') as file:
            json.dump(rows, file, indent=2)
        return path

    def read(self, path):
        with open(path) as file:
            return json.load(file)

    def verify(self, *arguments):
        """Exit status, and the rows."""
        result = self.main('verify', '-f', 'json', *arguments)
        self.assertEqual('', result.stderr)
        return result.returncode, json.loads(result.stdout)

    def found(self, *arguments, status=0):
        """The results, of which there is one for each device."""
        returned, rows = self.verify(*arguments)
        results = [row['Result'] for row in rows]
        self.assertEqual(status, returned, results)
        return results

    def fault(self, *arguments):
        result, = self.found(*arguments, status=1)
        return result

    def refused(self, *arguments):
        result = self.main('verify', *arguments)
        self.assertEqual((1, ''), (result.returncode, result.stdout))
        self.assertEqual(1, result.stderr.count('\n'), result.stderr)
        return result.stderr


@ddt.ddt
class VerifyTest(VerifyTestCase):

    def test_whole(self):
        self.fill(1, 2, 3)
        self.fill(4, serial='', ports='p', device=B)
        status, rows = self.verify(self.export(), '--key', self.key.public)
        self.assertEqual(0, status)
        first, last = self.store.handovers()[0], self.store.handovers()[2]
        self.assertEqual([
            {'Device': '02:00:00:00:00:01', 'Hand-overs': 3,
             'Since': first.time, 'Until': last.time, 'Result': 'complete',
             'Hash': chain.digest(last), 'Key': self.key.public},
            ('p', 1)], [rows[0], (rows[1]['Device'], rows[1]['Hand-overs'])])
        shown = self.main('verify', self.export()).stdout
        self.assertLessEqual(max(map(len, shown.splitlines())), 100)
        self.assertIn(chain.digest(last), shown)

    def test_needs_no_configuration(self):
        self.fill(1)
        path = self.export()
        os.remove(self.config)
        os.remove(self.path)
        self.assertEqual(['complete'], self.found(path))

    def test_functions(self):
        """They are exported with hyphens, and signed without."""
        self.fill(1, before=CRYPTO, after=CRYPTO)
        self.fill(2, before='no id', after=CRYPTO[:-1])
        with mock.patch('nova_accel.cmd.output.identifier', str):
            odd = self.export()
        self.assertEqual(['complete'], self.found(odd))
        self.store = None
        os.remove(self.path)
        self.open_store().sign_with(self.key)
        self.fill(1, before=CRYPTO, after=CRYPTO)
        path = self.export()
        self.assertEqual(['complete'], self.found(path))
        rows = self.read(path)
        for spelling in CRYPTO, rows[0]['Before'].upper():
            rows[0]['Before'] = spelling
            status = int(spelling != CRYPTO)
            self.found(self.write(rows), status=status)

    def test_failed_attempts(self):
        """The next attempt replaces them, and the chain does not break."""
        self.fill(1)
        for error in ('It is busy.', 'It is gone.'):
            self.fill(2, result=error)
            # of another part of the card
            self.fill(3, handle=B, result=error)
        self.fill(4, handle='0000:5e:00.2')
        self.fill(2, 3)
        self.assertEqual(['1', '', '', '2', '3', '4'], [
            one.place for one in self.store.handovers()])
        path = self.export()
        self.assertEqual(['complete'], self.found(path))
        rows = self.read(path)
        rows.insert(0, rows.pop(1))
        self.assertIn('does not follow', self.fault(self.write(rows)))

    def test_first_attempt_fails(self):
        self.fill(1, result='It is busy.')
        self.assertEqual(['no hand-over has ended'],
                         self.found(self.export()))

    def test_not_signed(self):
        self.fill(1)
        rows = self.read(self.export())
        for column in ('Version', 'Previous', 'Place', 'Salt', 'Key',
                       'Signature'):
            rows[0][column] = None
        self.assertIn('is not as it was signed', self.fault(self.write(rows)))

    def test_nothing(self):
        result = self.main('verify', self.write([]), '--key', 'k')
        self.assertEqual((0, 'The files have no hand-overs.\n'),
                         (result.returncode, result.stdout))

    def test_other_files(self):
        self.fill(1)
        rows = self.read(self.export())
        for content in ({}, [{}], [[]], 'x', [{**rows[0], 'Colour': 'red'}],
                        [{**rows[0], 'Result': 7}], [{'Time': '2026'}]):
            self.assertIn('it has something else',
                          self.refused(self.write(content)))
        self.assertIn('Is a directory', self.refused(self.directory))
        self.assertIn('No such file', self.refused('/nowhere'))

    @ddt.data(*itertools.product(
        ('Place', 'Time', 'Result', 'Device', 'Version', 'Previous', 'Key',
         'Signature'),
        ('9' * 5000, '-1', '\u0663', '\x1b[2J\n\u202e', '\ud800', 'A' * 70000)))
    @ddt.unpack
    def test_hostile_value(self, column, value):
        """It is refused in each format, and moves no cursor."""
        self.fill(1)
        path = self.export()
        row, = self.read(path)
        self.write([{**row, column: value}])
        certificate = self.write(
            {**json.loads(chain.certificate(self.store.handovers()[0])),
             column.lower(): value}, 'certificate.json')
        for files in ([path], [certificate, '--key', self.key.public]):
            for form in 'table', 'json', 'value', 'csv':
                result = self.main('verify', '-f', form, *files)
                self.assertEqual((1, ''), (result.returncode, result.stderr))
                self.assertTrue(
                    result.stdout.replace('\n', '').replace('\r', '')
                    .isprintable(), result.stdout[:300])

    def test_later_release(self):
        self.fill(1)
        with mock.patch.object(chain, 'VERSION', '2'):
            self.fill(2)
        self.assertIn('is of a later release', self.fault(self.export()))

    def test_host_that_signs_what_it_likes(self):
        """Numbers are checked as well."""
        self.fill(1)
        head, = self.store.handovers()
        for place, before in (('x', None), ('0', None), ('-1', None),
                              ('²', None), ('2', None), ('1', head)):
            with mock.patch.object(chain, 'dataclasses') as module:
                module.asdict = dataclasses.asdict
                module.replace = lambda record, **new: dataclasses.replace(
                    record, **{**new, **({'place': place}
                                         if 'place' in new else {})})
                record = chain.signed(handover(1), before, self.key)
            rows = [{name.capitalize(): value or None for name, value
                     in dataclasses.asdict(record).items()}]
            self.fault(self.write(rows))


class BrokenChainTest(VerifyTestCase):

    def setUp(self):
        super().setUp()
        self.fill(*range(1, 7))
        self.whole = self.export()
        self.rows = self.read(self.whole)

    def test_every_byte(self):
        """One byte of the file is another one."""
        with open(self.whole, 'rb') as file:
            content = file.read()
        path = os.path.join(self.directory, 'edited.json')

        @hypothesis.given(strategies.integers(0, len(content) - 1),
                          strategies.integers(0, 255))
        @hypothesis.settings(max_examples=300)
        def check(at, byte):
            edited = content[:at] + bytes([byte]) + content[at + 1:]
            with open(path, 'wb') as file:
                file.write(edited)
            with contextlib.suppress(ValueError):
                # white space between values means nothing
                hypothesis.assume(json.loads(edited) != self.rows)
            result = self.main('verify', path)
            self.assertEqual(1, result.returncode, edited)
            self.assertNotIn('Traceback', result.stderr)
        check()

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(strategies.integers(0, 5), strategies.data())
    def test_every_character_of_a_value(self, number, data):
        """Also of a value that is sealed."""
        row = dict(self.rows[number])
        column = data.draw(strategies.sampled_from(
            [name for name, value in row.items() if value]))
        value = row[column]
        at = data.draw(strategies.integers(0, len(value) - 1))
        new = data.draw(strategies.characters(
            exclude_characters=value[at], exclude_categories=['Cs']))
        row[column] = value[:at] + new + value[at + 1:]
        path = self.write([*self.rows[:number], row, *self.rows[number + 1:]])
        self.assertEqual(1, self.main('verify', path).returncode, row)

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(strategies.permutations(range(6)))
    def test_order(self, order):
        hypothesis.assume(order != [*range(6)])
        path = self.write([self.rows[number] for number in order])
        self.assertIn('does not follow', self.fault(path))

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(strategies.sets(strategies.integers(0, 5), min_size=1))
    def test_missing(self, left):
        """Detected, except at the end: for that a hash is needed."""
        rows = [self.rows[number] for number in sorted(left)]
        path = self.write(rows)
        if left == {*range(len(left))}:
            self.assertEqual(['complete'], self.found(path))
        else:
            self.fault(path)
        newest = chain.digest(self.store.handovers()[-1])
        if 5 in left:
            self.main('verify', path, '--hash', newest)
        else:
            self.assertIn('its end was cut off', self.refused(
                path, '--hash', newest))

    def test_twice(self):
        self.assertIn('does not follow', self.fault(
            self.write([*self.rows[:3], *self.rows[2:]])))

    def test_exports_are_joined(self):
        parts = [self.write(rows, f'{number}.json') for number, rows
                 in enumerate((self.rows[:4], self.rows[2:]))]
        for files in parts, parts[::-1]:
            (row,) = self.verify(*files)[1]
            self.assertEqual(('complete', 6),
                             (row['Result'], row['Hand-overs']))
        # there is nothing between them
        self.assertIn('does not follow', self.fault(
            self.write(self.rows[:2]), self.write(self.rows[3:], 'b.json')))

    def test_pruned(self):
        with mock.patch.object(journal, 'MOST_HANDOVERS', 3):
            old = '2025-11-22T02:17:43+00:00'
            for number in range(7, 10):
                self.fill(number, time=old)
            with contextlib.closing(sqlite3.connect(self.path)) as db, db:
                db.execute('UPDATE handovers SET time = ?', (old,))
            self.fill(10)
            rows = self.read(self.export())
            self.assertEqual(['8', '9', '10'], [row['Place'] for row in rows])
            # the times were changed above
            for row, record in zip(rows, self.rows):
                row['Time'] = old
            rows[-1]['Time'] = '2026-11-22T02:17:10+00:00'
            self.assertEqual(['complete from number 8 on'],
                             self.found(self.write(rows)))
            self.assertIn('has number 9, and those before it are missing',
                          self.fault(self.write(rows[1:])))
        self.assertIn('are missing', self.fault(self.write(rows)))

    def test_card_that_moves_in_the_host(self):
        """Pruning begins with its oldest, wherever it was."""
        self.fill(7, device=B, handle=B)
        self.fill(8)
        self.assertEqual([*map(str, range(1, 9))], [
            one.place for one in self.store.handovers()])
        with mock.patch.object(journal, 'MOST_IN_THAT_TIME', 3):
            self.fill(9)
        self.assertEqual(['7', '8', '9'], [
            one.place for one in self.store.handovers()])


class CertificateTest(VerifyTestCase):
    """What the owner of a server has from its metadata."""

    def setUp(self):
        super().setUp()
        self.fill(1, shown='{"cleared": true}')
        self.fill(2)
        self.text = chain.certificate(self.store.handovers()[0])
        self.path = self.file(self.text)

    def file(self, text):
        path = os.path.join(self.directory, 'certificate.json')
        with open(path, 'w') as file:
            file.write(text)
        return path

    def test_signed(self):
        journal_ = self.write([
            {name.capitalize(): value or None for name, value
             in dataclasses.asdict(one).items()}
            for one in self.store.handovers()])
        for arguments in (['--key', self.key.public], [journal_]):
            rows = self.verify(self.path, *arguments)[1]
            self.assertEqual(('signed', json.loads(self.text)['hash']), (
                rows[-1]['Result'], rows[-1]['Hash']))
        self.assertIn('give that of its host by --key',
                      self.refused(self.path))
        self.assertIn('is missing', self.refused(
            self.path, self.write(self.read(journal_)[1:])))

    def test_says_nothing_of_others(self):
        one = self.store.handovers()[0]
        for word in (one.server, one.device, one.serial, one.salt, one.key):
            self.assertNotIn(word, self.text)
        # what was in two records is not seen to be the same
        self.assertNotEqual(*(
            chain.statement(dataclasses.replace(one, salt=salt))['seal']
            for salt in 'ab'))

    def test_another_host(self):
        other = keys.create(os.path.join(self.directory, 'other.key'))
        self.assertIn('or of another host',
                      self.fault(self.path, '--key', other.public))

    @hypothesis.settings(max_examples=100)
    @hypothesis.given(strategies.integers(0, 1000), strategies.characters(
        codec='ascii'))
    def test_every_character(self, at, character):
        at %= len(self.text)
        edited = self.text[:at] + character + self.text[at + 1:]
        with contextlib.suppress(ValueError):
            hypothesis.assume(json.loads(edited) != json.loads(self.text))
        self.assertEqual(1, self.main(
            'verify', self.file(edited), '--key', self.key.public).returncode)

    def test_other_files(self):
        for content in ({'hash': 'a'}, {'hash': 'a', 'signature': 7}, 7):
            self.assertIn('it has something else', self.refused(
                self.write(content), '--key', 'k'))


class KeysOfChainTest(VerifyTestCase):

    def other(self, name='other.key'):
        return keys.create(os.path.join(self.directory, name))

    def test_former_key_announces(self):
        self.fill(1, 2)
        new = self.other()
        self.assertEqual(1, self.store.sign_with(new, self.key))
        self.assertEqual(0, self.store.sign_with(new, self.key))
        self.fill(3)
        path = self.export()
        for arguments in (), ('--key', new.public):
            self.assertEqual(['complete'], self.found(path, *arguments))
        self.assertIn('another key signed it', self.fault(
            path, '--key', self.key.public))
        rows = self.read(path)
        self.assertEqual(
            ['clean', 'clean', f'new key {new.public}', 'clean'],
            [row['Result'] for row in rows])
        self.assertEqual([self.key.public] * 3 + [new.public],
                         [row['Key'] for row in rows])
        # nothing of it is a hand-over
        shown = self.main('history', A, '--journal', path, '-f', 'json')
        self.assertEqual(3, len(json.loads(shown.stdout)))

    def test_lost_key(self):
        self.fill(1, 2)
        new = self.other()
        # a key that is not the one before announces nothing
        for former in self.other('third.key'), None:
            self.store.sign_with(new, former)
        self.fill(3)
        path = self.export()
        result, = self.found(path, '--key', new.public)
        self.assertIn('complete; the key was lost before ', result)
        self.assertEqual(4, len(self.read(path)))

    def test_key_that_nothing_announces(self):
        self.fill(1)
        self.store._key = self.other()
        self.fill(2)
        self.assertIn('which no hand-over announces', self.fault(self.export()))

    def test_another_announces(self):
        """A record that is not signed by the key that it follows or names."""
        self.fill(1)
        head, = self.store.handovers()
        new, third = self.other(), self.other('third.key')
        record = chain.announced('now', head, new, None)
        forged = dataclasses.replace(record, key=third.public)
        forged = dataclasses.replace(forged, signature=third.sign(
            chain.spelled(chain.statement(forged))))
        for one, is_good in (record, True), (forged, False):
            rows = [{name.capitalize(): value or None for name, value
                     in dataclasses.asdict(each).items()}
                    for each in (head, one)]
            self.found(self.write(rows), status=int(not is_good))

    def test_another_host(self):
        self.fill(1)
        self.assertEqual(
            f'{self.export()} must be signed by the key '
            f"'{self.other().public}', and no record is: name the key and the "
            f'files of one host.\n'.partition(' must')[0],
            self.refused(self.export(), '--key',
                         self.other().public).partition(' must')[0])
        self.assertIn('name the key and the files of one host',
                      self.refused(self.export(), '--key', 'k'))
        self.assertIn('another host wrote the hand-over', self.refused(
            self.export(), '--hash', '0' * 64))

    def test_records_of_two_hosts(self):
        """A card moved there: it begins a chain."""
        self.fill(1)
        first = self.export()
        self.path = os.path.join(self.directory, 'second.sqlite')
        self.open_store().sign_with(self.other())
        self.fill(2)
        second = self.export('second.json', '--store', self.path)
        self.assertIn('has a twin', self.fault(first, second))
        self.assertIn('does not follow', self.fault(
            self.write(self.read(first) + self.read(second))))

    def test_older_copy_of_the_store(self):
        """What it did since is in an earlier export only, or with an owner."""
        self.fill(1)
        self.store._db.execute('PRAGMA wal_checkpoint(TRUNCATE)')
        shutil.copy(self.path, self.path + '.copy')
        self.fill(2)
        owners = chain.digest(self.store.handovers()[-1])
        before = self.export('before.json')
        self.store._db.close()
        os.replace(self.path + '.copy', self.path)
        self.open_store().sign_with(self.key)
        self.fill(3)
        after = self.export()
        self.assertEqual(['complete'], self.found(after))
        self.assertIn('an older copy of its claim store',
                      self.refused(after, '--hash', owners))
        self.assertIn('has a twin', self.fault(before, after))

    def test_copy_signs_nothing(self):
        self.fill(1)
        copy = claim_store.copy_of(self.path)
        copy.add_handover(handover(2))
        self.assertEqual(['1', ''],
                         [one.place for one in copy.handovers()])

    def test_command_prints_it(self):
        def printed(*arguments):
            return self.main('handovers', '--key', '--config-file',
                             self.config, *arguments)
        result = printed()
        self.assertEqual((0, f'{self.key.public}\n', ''), (
            result.returncode, result.stdout, result.stderr))
        os.chmod(self.path + keys.SUFFIX, 0o644)
        self.assertIn('others can read it', printed().stderr)
        missing = printed('--store', '/nowhere')
        self.assertEqual((1, ''), (missing.returncode, missing.stdout))
        self.assertIn('/nowhere.key', missing.stderr)
