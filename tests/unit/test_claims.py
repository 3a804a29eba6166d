# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One handle, one server, whatever happens to the process; and stores of
other releases."""

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from unittest import mock
import uuid

import fixtures
import testtools

from nova_accel import exception
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import journal
from nova_accel.store import schema
from nova_accel.store import values
from tests.unit.claims import (
    claim, DEVICE, DISABLED, HANDLE, handle, serials)

BOUND = model.ClaimState.BOUND
PROJECT = 'a project'
LOADED = model.Loaded('b' * 32, str(uuid.uuid4()), None, 'sha512-0', PROJECT)


def unknown(origin):
    """What a region carries whose programming has not come to its end."""
    return model.Loaded(None, None, None, None, origin)


class StoreTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'claims.sqlite')

    def assertUnavailable(self, words, function, *args, **kwargs):
        error = self.assertRaises(exception.AcceleratorsUnavailable,
                                  function, *args, **kwargs)
        # one sentence that names the file
        self.assertIn(f'The claim store {self.path} ', str(error))
        self.assertIn(words, str(error))
        self.assertRegex(str(error), r'[^.]\.\Z')

    @contextlib.contextmanager
    def file(self):
        """The store without ClaimStore."""
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            yield db
            db.commit()


class ClaimStoreTest(StoreTestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(self.path)

    def test_round_trip(self):
        one = claim(handle=model.AttachHandle(
            model.HandleType.PCI, '0000:86:00.0', managed=False,
            companions=('0000:86:00.1',), parent='0000:86:00.2'),
            created_type='nvidia-558', error='e', prepared=True,
            restore_function='a' * 32, restore_bitstream=str(uuid.uuid4()),
            serial='S1', driver_request='{"keys": {}}', driver_memory='[1]',
            operators_bitstream=str(uuid.uuid4()))
        self.store.add([one])
        found, = self.store.claims()
        self.assertEqual(one, found)
        # these do not count when handles are compared
        self.assertEqual((False, ('0000:86:00.1',), '0000:86:00.2'), (
            found.handle.managed, found.handle.companions,
            found.handle.parent))
        self.assertEqual([one], self.store.claims(one.instance_uuid))
        self.assertEqual([], self.store.claims(str(uuid.uuid4())))
        self.store.remove([one])
        self.assertEqual([], self.store.claims())

    def test_update(self):
        one = claim()
        self.store.add([one])
        changed, = self.store.update(
            [one], state=model.ClaimState.UNKNOWN, error='why',
            restore_function='a' * 32, prepared=True, group='_B')
        self.assertEqual(
            (model.ClaimState.UNKNOWN, 'why', 'a' * 32, True, '_B'),
            (changed.state, changed.error, changed.restore_function,
             changed.prepared, changed.group))
        self.assertEqual([changed], claim_store.ClaimStore(self.path).claims())

    def test_new_file(self):
        """The host may have had another one; a store without a file cannot
        be lost."""
        self.assertEqual({values.EVERYTHING}, self.store.unsettled())
        self.assertEqual({values.EVERYTHING},
                         claim_store.ClaimStore(self.path).unsettled())
        self.assertEqual(frozenset(),
                         claim_store.ClaimStore(':memory:').unsettled())

    def test_card_goes_and_comes_back(self):
        """What is known of a card goes with it, and stays where it is away."""
        address, empty, serial = '0000:5e:00.0', '0000:af:00.0', 'S1'
        one = dataclasses.replace(
            DEVICE, serial=serial, record=(('firmware', '1'),))
        other = dataclasses.replace(
            DEVICE, serial='S2', record=(('firmware', '2'),))
        self.store.set_devices({address: one})
        self.store.set_loaded(address, 0, LOADED)
        self.command().disable(DISABLED)
        self.store.change_unclean((), [values.Unclean(
            address, address, serial, one.ids, 'none')])
        unknown_ = model.Loaded(None, None, None, '', None)
        self.store.place(other, True, {0: unknown_})
        self.store.set_devices({address: other})
        for store in self.store, claim_store.ClaimStore(self.path):
            self.assertEqual((values.Card(
                one.card, one.record, {0: LOADED}),), store.away())
            self.assertEqual({(address, 0): unknown_}, store.loaded())
            self.assertEqual({address: other}, store.devices())
        back = dataclasses.replace(one, address=empty)
        self.store.place(back, True, {0: unknown(PROJECT)})
        self.store.set_devices({address: other, empty: back})
        for store in self.store, claim_store.ClaimStore(self.path):
            self.assertEqual((), store.away())
            self.assertEqual({address: 'S2', empty: serial}, serials(store))
            self.assertEqual(unknown(PROJECT), store.loaded()[empty, 0])
            self.assertEqual([(empty, serial)], [
                (w.device_address, w.serial) for w in store.disabled()])
            row, = store.unclean()
            self.assertEqual((serial, address), (
                row.serial, row.handle_address))

    def test_two_cards_with_one_serial_number(self):
        """Neither is known by it, and what is known of one stays its own."""
        one = dataclasses.replace(DEVICE, serial='S1')
        other = dataclasses.replace(one, address='0000:af:00.0')
        self.store.set_devices({one.address: one})
        self.store.set_loaded(one.address, 0, LOADED)
        self.store.place(other, False, {0: unknown(PROJECT)})
        self.store.set_devices({one.address: one, other.address: other})
        self.assertEqual({}, serials(self.store))
        self.assertEqual({(one.address, 0): LOADED,
                          (other.address, 0): unknown(PROJECT)},
                         self.store.loaded())
        # one is taken out: the other one is known by the number again
        self.store.set_devices({other.address: other})
        self.assertEqual({other.address: 'S1'}, serials(self.store))
        self.assertEqual([PROJECT], [
            card.origins[0] for card in self.store.away()])

    def test_two_cards_change_their_places(self):
        """The first one is adopted while the other one still seems to be
        where it was."""
        places = '0000:5e:00.0', '0000:af:00.0'
        cards = [dataclasses.replace(DEVICE, serial=f'S{n}') for n in (1, 2)]
        self.store.set_devices({
            address: dataclasses.replace(card, address=address)
            for address, card in zip(places, cards, strict=True)})
        self.command().disable(dataclasses.replace(
            DISABLED, device_address=places[1], serial='S2'))
        self.store.place(dataclasses.replace(cards[1], address=places[0]),
                         False, {0: unknown('q')})
        self.store.place(dataclasses.replace(cards[0], address=places[1]),
                         True, {0: unknown('p')})
        self.store.set_devices({
            address: dataclasses.replace(card, address=address)
            for address, card in zip(places, cards[::-1], strict=True)})
        self.assertEqual({places[0]: 'S2', places[1]: 'S1'},
                         serials(self.store))
        self.assertEqual([(places[0], 'S2')], [
            (w.device_address, w.serial) for w in self.store.disabled()])
        self.assertEqual((), self.store.away())
        self.assertEqual({(places[0], 0): unknown('q'),
                          (places[1], 0): unknown('p')}, self.store.loaded())

    def command(self):
        return claim_store.existing(self.path)

    def test_settle(self):
        one, other = (values.Unsettled(address='0000:5e:00.0'),
                      values.Unsettled(serial='S1'))
        before = self.store.generation
        self.store.settle([values.EVERYTHING], [one, other])
        self.assertNotEqual(before, self.store.generation)
        held = claim()
        self.store.settle([one], claims=[held])
        for store in (self.store, claim_store.ClaimStore(self.path)):
            self.assertEqual(({other}, [held]), (
                store.unsettled(), store.claims()))
        # all or none
        self.assertRaises(exception.ClaimConflict, self.store.settle,
                          [other], claims=[claim()])
        for store in (self.store, claim_store.ClaimStore(self.path)):
            self.assertEqual(({other}, [held]), (
                store.unsettled(), store.claims()))

    def test_settle_while_another_thread_does(self):
        one, other = (values.Unsettled(address='0000:5e:00.0'),
                      values.Unsettled(serial='S1'))

        def late():
            self.store.settle([values.EVERYTHING], [other])
            yield one
        self.store.settle(todo=late())
        for store in (self.store, claim_store.ClaimStore(self.path)):
            self.assertEqual({one, other}, store.unsettled())

    def test_products_that_come_back(self):
        """Several that were in one slot, without serial numbers."""
        rows = {values.Unsettled('0000:5e:00.0', ids=ids)
                for ids in ('', '10de:2330', '1002:74a1 1002:0c34')}
        self.store.settle([values.EVERYTHING], rows)
        for store in (self.store, claim_store.ClaimStore(self.path)):
            self.assertEqual(rows, store.unsettled())

    def test_parts_that_are_settled(self):
        self.store.settle([values.EVERYTHING])
        for parts in (), ('0',), ('0000:5e:00.1', '0000:5e:00.2'):
            row = values.Unsettled('0000:5e:00.0', settled=frozenset(parts))
            self.store.settle(self.store.unsettled(), [row])
            for store in (self.store, claim_store.ClaimStore(self.path)):
                self.assertEqual({row}, store.unsettled())
        # of two that are about one card only what both say is settled
        self.store.settle(todo=[values.Unsettled(
            '0000:5e:00.0', settled=frozenset(('0000:5e:00.2', '1')))])
        self.assertEqual({dataclasses.replace(
            row, settled=frozenset(('0000:5e:00.2',)))},
            self.store.unsettled())

    def test_lost_card_without_a_serial_number_leaves_its_slot(self):
        """The card in that slot now is not taken for it."""
        address, ids = DEVICE.address, DEVICE.ids
        self.store.settle(self.store.unsettled())
        self.store.set_devices({address: DEVICE})
        self.store.settle(todo=[values.Unsettled(address)])
        self.assertEqual({values.Unsettled(address)}, self.store.unsettled())
        for there in {}, {address: dataclasses.replace(
                DEVICE, product_id='ffff')}:
            self.store.set_devices(there)
            row, = self.store.unsettled()
            self.assertEqual((address, ids, True),
                             (row.address, row.ids, row.moved))
            for device in there.values():
                self.assertFalse(row.means(device))

    def test_update_of_a_claim_that_was_read_long_ago(self):
        one, gone = claim(), claim(handle=handle(1))
        self.store.add([one, gone])
        self.store.update([one], error='later')
        self.store.remove([gone])
        changed, = self.store.update([gone, one], state=BOUND)
        self.assertEqual(('later', BOUND), (changed.error, changed.state))
        self.assertEqual([changed], self.store.claims())

    def test_update_of_what_is_no_field(self):
        one = claim()
        self.store.add([one])
        for name in ('function_uuid', 'handle', 'uuid', 'request_group',
                     "error = 'x' --"):
            self.assertRaises(TypeError, self.store.update, [one],
                              **{name: 'x'})
        self.assertEqual([one], self.store.update([one]))
        self.assertEqual([], self.store.update([], error='x'))

    def test_by_uuid(self):
        some = [claim(handle=handle(n)) for n in range(3)]
        self.store.add(some)
        self.assertEqual(some[1:], self.store.by_uuid(
            [some[2].uuid, some[1].uuid, str(uuid.uuid4())]))
        self.assertEqual([], self.store.by_uuid([]))

    def test_second_server_is_refused_and_all_of_its_claims(self):
        holder = claim()
        self.store.add([holder])
        second = str(uuid.uuid4())
        log = self.useFixture(fixtures.FakeLogger())
        error = self.assertRaises(
            exception.ClaimConflict, self.store.add,
            [claim(second, handle(0)), claim(second)])
        # the log says who has it, the fault of the second server does not
        self.assertIn(holder.instance_uuid, log.output)
        self.assertNotIn(holder.instance_uuid, str(error))
        self.assertEqual([holder], self.store.claims())
        # the same claim twice is no matter of handles
        self.assertUnavailable(
            'UNIQUE', self.store.add,
            [claim(uuid=holder.uuid, handle=handle(0))])

    def test_one_of_many_threads_wins(self):
        won = []
        self.useFixture(fixtures.FakeLogger())

        def take():
            mine = claim()
            try:
                self.store.add([mine])
                won.append(mine)
            except exception.ClaimConflict:
                pass
        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(1, len(won))
        self.assertEqual(won, self.store.claims())

    def test_roles(self):
        one = claim()
        self.store.add([one])
        self.store.update([one], consumer_uuid='migration')
        self.assertEqual([], self.store.claims(
            one.instance_uuid, model.Role.CURRENT))
        self.assertEqual(1, len(self.store.claims(
            one.instance_uuid, model.Role.OLD)))
        self.assertEqual(1, len(self.store.claims(role=model.Role.OLD)))

    def test_generation(self):
        one = claim()
        before = [self.store.generation]
        for change, *args in ((self.store.add, [one]),
                              (self.store.update, [one]),
                              (self.store.remove, [one])):
            change(*args)
            self.assertNotIn(self.store.generation, before)
            before.append(self.store.generation)
        self.store.claims()
        self.store.set_devices({})
        self.assertEqual(before[-1], self.store.generation)

    def test_devices(self):
        self.store.set_devices({DEVICE.address: DEVICE})
        again = claim_store.ClaimStore(self.path)
        self.assertEqual({DEVICE.address: DEVICE}, again.devices())
        again.set_devices({})
        self.assertEqual({}, self.store.devices())

    def test_loaded(self):
        self.store.set_loaded(DEVICE.address, 0, LOADED)
        self.store.set_loaded(DEVICE.address, 1, LOADED)
        again = claim_store.ClaimStore(self.path)
        self.assertEqual({(DEVICE.address, 0): LOADED,
                          (DEVICE.address, 1): LOADED}, again.loaded())
        # a programming begins
        again.set_loaded(DEVICE.address, 0, unknown(PROJECT))
        self.assertEqual({(DEVICE.address, 0): unknown(PROJECT),
                          (DEVICE.address, 1): LOADED}, again.loaded())
        again.set_loaded(DEVICE.address, 0, model.AS_READ)
        again.set_loaded(DEVICE.address, 2, model.AS_READ)
        for store in again, claim_store.ClaimStore(self.path):
            self.assertEqual({(DEVICE.address, 1): LOADED}, store.loaded())

    def test_origins(self):
        """What the driver reads has one too; unknown is another thing."""
        for origin in (model.OPERATOR, PROJECT, model.SOME_PROJECT, None):
            for loaded in (unknown(origin),
                           dataclasses.replace(LOADED, origin=origin),
                           model.Loaded(None, None, None, '', origin)):
                self.store.set_loaded(DEVICE.address, 0, loaded)
                self.assertEqual(
                    {} if loaded == model.AS_READ
                    else {(DEVICE.address, 0): loaded},
                    claim_store.ClaimStore(self.path).loaded())
        # nothing was read back after the programming
        self.store.set_loaded(DEVICE.address, 0, dataclasses.replace(
            LOADED, function_uuid=None))
        self.assertEqual({(DEVICE.address, 0): unknown(LOADED.origin)},
                         self.store.loaded())

    def test_reserved(self):
        self.assertEqual({}, self.store.reserved())
        one = ('p', 'CUSTOM_ACCELERATOR_FPGA'), values.Reserved(1, 2, 0)
        two = ('p', 'VGPU'), values.Reserved(1, 2)
        self.store.set_reserved(dict([one, (two[0], one[1])]))
        self.store.set_reserved(dict([two]))
        again = claim_store.ClaimStore(self.path)
        self.assertEqual(dict([one, two]), again.reserved())
        again.set_reserved({two[0]: None, ('q', 'VGPU'): None})
        self.assertEqual(dict([one]), self.store.reserved())

    def test_killed_in_the_middle_of_a_transaction(self):
        holder = claim()
        self.store.add([holder])
        program = textwrap.dedent('''
            import sys, os
            from nova_accel.store import claim_store, schema
            store = claim_store.ClaimStore(sys.argv[1])
            with store._transaction() as db:
                db.execute('DELETE FROM claims')
                print('deleted', flush=True)
                sys.stdin.read()
        ''')
        process = subprocess.Popen(
            [sys.executable, '-c', program, self.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stdin.close)
        self.assertEqual(b'deleted\n', process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.assertEqual([holder], self.store.claims())
        # and the next writer does not wait for the dead one
        self.store.remove([holder])


class DamageTest(StoreTestCase):

    def test_no_database(self):
        with open(self.path, 'wb') as file:
            file.write(b'not a database at all, but long enough' * 100)
        self.assertUnavailable('restore a backup', claim_store.ClaimStore,
                               self.path)

    def test_no_directory(self):
        with open(self.path, 'w'):
            pass
        self.path = os.path.join(self.path, 'missing', 'claims.sqlite')
        self.assertUnavailable('may write it', claim_store.ClaimStore,
                               self.path)

    def test_damaged_pages(self):
        store = claim_store.ClaimStore(self.path)
        store.add([claim(handle=handle(n)) for n in range(100)])
        store._db.close()
        size = os.path.getsize(self.path)
        with open(self.path, 'r+b') as file:
            file.seek(4096)
            file.write(b'\xff' * (size - 4096))
        self.assertUnavailable('which server has which device',
                               lambda: claim_store.ClaimStore(self.path))

    def test_disk_full(self):
        store = claim_store.ClaimStore(self.path)
        one = claim()
        store.add([one])
        pages = store._db.execute('PRAGMA page_count').fetchone()[0]
        store._db.execute(f'PRAGMA max_page_count = {pages}')
        large = DEVICE.with_region(0, reason='x' * 100000)
        many = [claim(handle=handle(n), error='x' * 10000) for n in range(9)]
        for method, *args in (
                (store.add, many), (store.set_devices, {'x': large}),
                (lambda: store.update([one], error='x' * 100000),)):
            self.assertUnavailable('make room', method, *args)
        # nothing of it was written, and what takes no room goes on
        self.assertEqual([one], store.claims())
        self.assertEqual({}, store.devices())
        store.remove([one])
        self.assertEqual([], store.claims())

    def test_another_process_writes(self):
        store = claim_store.ClaimStore(self.path, timeout=0.05)
        one = claim()
        store.add([one])
        with self.file() as other:
            other.execute('BEGIN IMMEDIATE')
            self.assertUnavailable('which other process', store.remove, [one])
            self.assertUnavailable('which other process',
                                   claim_store.ClaimStore, self.path,
                                   timeout=0.05)
            # readers do not wait
            self.assertEqual([one], store.claims())
            # nor does what changes nothing
            self.assertEqual([], store.update([], error='x'))
            store.remove([])
        store.remove([one])

    def test_every_method(self):
        """Whatever SQLite says, one sentence, and the lock is free after."""
        one = claim()
        store = claim_store.ClaimStore(self.path)
        store.add([one])
        with self.file() as db:
            for table in ('claims', 'cards', 'regions', 'ledger'):
                db.execute(f'DROP TABLE {table}')
        # claims are known without the file: plain servers do not need it
        self.assertEqual([one], store.claims())
        for call in (store.devices, store.reserved,
                     lambda: store.add([one]), lambda: store.remove([one]),
                     lambda: store.update([one], error='x'),
                     lambda: store.set_devices({}),
                     lambda: store.set_loaded('a', 0, LOADED),
                     lambda: store.set_loaded('a', 0, model.AS_READ),
                     lambda: store.set_reserved({
                         ('p', 'VGPU'): values.Reserved(1, 1)}),
                     lambda: store.set_reserved({('p', 'VGPU'): None})):
            self.assertUnavailable('no such table', call)

    def test_rows_that_are_no_json(self):
        store = claim_store.ClaimStore(self.path)
        store.add([claim()])
        store.set_devices({DEVICE.address: DEVICE})
        for text in ('', '{', '[]', '3', 'null', '{"regions": [3]}'):
            with self.file() as db:
                db.execute('UPDATE cards SET device = ?', (text,))
            self.assertUnavailable('table cards', store.devices)
        for column, reads in (('record', lambda known: known.devices()),
                              ('notes', lambda known: known.notes())):
            with self.file() as db:
                db.execute("UPDATE cards SET device = '{}', record = '[]'")
                db.execute(f"UPDATE cards SET {column} = '[3'")
            self.assertUnavailable('table cards', lambda: reads(
                claim_store.ClaimStore(self.path)))
        with self.file() as db:
            db.execute("UPDATE claims SET handle = '{'")
        self.assertUnavailable('table claims',
                               lambda: claim_store.ClaimStore(self.path))


class HandoversTest(StoreTestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(self.path)

    @staticmethod
    def handover(number, **more):
        return values.Handover(**{
            'time': '2025-11-22T02:17:43+00:00',
            'device': '0000:5e:00.0', 'serial': '',
            'handle': '0000:5e:00.0', 'server': str(number), **more})

    def test_round_trip(self):
        one = self.handover(
            1, serial='s', origin='o', method='m', before='b', after='a',
            result='r', since='i', shown='{}')
        self.store.add_handover(one)
        self.store.add_handover(self.handover(2))
        for found in (self.store.handovers(),
                      claim_store.ClaimStore(self.path).handovers(),
                      claim_store.copy_of(self.path).handovers()):
            self.assertEqual([one, self.handover(2)], found)

    def test_the_newest_are_kept(self):
        with mock.patch.object(journal, 'MOST_HANDOVERS', 3):
            for number in range(5):
                self.store.add_handover(self.handover(number))
        self.assertEqual(['2', '3', '4'],
                         [h.server for h in self.store.handovers()])
        self.assertEqual(1000, journal.MOST_HANDOVERS)

    def test_no_server_drives_out_the_record_of_others(self):
        """Boot and delete in a loop, on this device or on another one."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        with mock.patch.object(journal, 'MOST_HANDOVERS', 3):
            self.store.add_handover(self.handover(1))
            for number in range(10, 20):
                self.store.add_handover(self.handover(
                    number, device='0000:81:00.0'))
            self.store.add_handover(self.handover(2, time=now))
            for number in range(20, 30):
                self.store.add_handover(self.handover(number, time=now))
            kept = {h.server for h in self.store.handovers()}
            self.assertEqual({'17', '18', '19', '2', *map(str, range(20, 30))},
                             kept)
            with mock.patch.object(journal, 'MOST_IN_THAT_TIME', 5):
                self.store.add_handover(self.handover(30, time=now))
            self.assertEqual(5, sum(
                h.device == '0000:5e:00.0' for h in self.store.handovers()))

    def test_opened_again_in_one_process(self):
        """A descriptor of the file that is closed ends the locks of SQLite in
        this process, and a command that comes and goes removes the WAL."""
        first = claim_store.ClaimStore(self.path)
        again = claim_store.ClaimStore(self.path)
        subprocess.run(
            [sys.executable, '-W', 'ignore', '-c',
             'import sys; from nova_accel.store import claim_store; '
             'claim_store.existing(sys.argv[1]).give_order("a", "b")',
             self.path], check=True,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})
        again.add([claim()])
        self.assertEqual(1, len(claim_store.copy_of(self.path).claims()))
        self.assertEqual(0, len(first.claims()))

    def test_only_its_user_reads_it(self):
        for suffix in '', '-wal', '-shm':
            self.assertEqual(0o600, stat.S_IMODE(
                os.stat(self.path + suffix).st_mode))
        # also one that was restored from a copy
        os.chmod(self.path, 0o644)
        claim_store.ClaimStore(self.path)
        self.assertEqual(0o600, stat.S_IMODE(os.stat(self.path).st_mode))

    def test_errors_that_alternate_drive_nothing_out(self):
        """A device that is not clean is tried again each minute."""
        with mock.patch.object(journal, 'MOST_HANDOVERS', 4):
            self.store.add_handover(self.handover(1, result='clean'))
            # the same server had the same handle before
            self.store.add_handover(self.handover(2, result='not cleaned'))
            for _ in range(3):
                for error in ('It is busy.', 'It is gone.'):
                    self.store.add_handover(self.handover(2, result=error))
            results = [h.result for h in self.store.handovers()]
            self.assertEqual(['clean', 'not cleaned', 'It is gone.'], results)
            # the end of it does not hide that it failed
            self.store.add_handover(self.handover(2, result='clean'))
            self.assertEqual([*results, 'clean'], [
                h.result for h in self.store.handovers()])


class WaitingTest(StoreTestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(self.path)
        self.one, self.two = (
            claim(handle=handle(n), state=model.ClaimState.DELETING)
            for n in (1, 2))
        self.store.add([self.one, self.two])

    def assertWaiting(self, *claims):
        for store in self.store, claim_store.ClaimStore(self.path):
            self.assertEqual([c.handle for c in claims],
                             [c.handle for c in store.all_claims() if c.waits])

    def test_changes(self):
        self.assertWaiting()
        before = self.store.generation
        self.store.await_operator(self.two)
        self.assertNotEqual(before, self.store.generation)
        self.store.await_operator(self.one)
        # one that waits already stays where it was
        self.store.await_operator(self.two)
        self.assertWaiting(self.two, self.one)
        self.assertEqual([], self.store.claims())
        # with the ledger, in one transaction
        row = values.Reserved(0, 1)
        self.store.set_reserved(
            {('p', 'VGPU'): row}, self.store.all_claims()[:1])
        self.assertWaiting(self.one)
        self.assertEqual({('p', 'VGPU'): row}, self.store.reserved())

    def test_nothing_changes_where_it_cannot_be_written(self):
        self.store.await_operator(self.one)
        with self.file() as db:
            db.execute('ALTER TABLE claims RENAME TO gone')
        self.assertUnavailable('no such table', self.store.await_operator,
                               self.two)
        self.assertUnavailable('no such table', self.store.set_reserved, {
            ('p', 'VGPU'): values.Reserved(0, 1)}, self.store.all_claims())
        with self.file() as db:
            db.execute('ALTER TABLE gone RENAME TO claims')
        self.assertWaiting(self.one)
        self.assertEqual(([self.two], {}), (
            self.store.claims(), self.store.reserved()))

    def test_card_that_has_moved(self):
        """The handle is where its card is now; a server's there stays."""
        moved = dataclasses.replace(self.one, handle=handle(3))
        other = claim(handle=handle(3))
        self.store.add([other])
        self.assertRaises(exception.ClaimConflict,
                          self.store.await_operator, moved)
        self.assertEqual(3, len(self.store.claims()))
        self.store.remove([other])
        self.store.await_operator(moved)
        self.assertWaiting(moved)


class OtherReleasesTest(StoreTestCase):

    #: what makes a store one of the next version, for the tests
    STEP = textwrap.dedent('''
        from nova_accel.store import schema
        def step(db):
            for statement in (
                    "ALTER TABLE claims ADD COLUMN more TEXT",
                    "UPDATE claims SET more = serial",
                    "CREATE TABLE others (number INTEGER)"):
                db.execute(statement)
        schema.MIGRATIONS = {schema.VERSION: step}
        schema.VERSION += 1
    ''')

    def schema(self):
        """Names of tables -> names and kinds of their columns."""
        with self.file() as db:
            return {name: (
                db.execute(f'PRAGMA table_info({name})').fetchall(),
                db.execute(f'PRAGMA index_list({name})').fetchall())
                for name, in db.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'")
            }, db.execute('PRAGMA user_version').fetchone()[0]

    def content(self):
        with open(self.path, 'rb') as file:
            return file.read()

    def next_release(self):
        """From now on this is the release after the one that wrote the store.
        """
        for name in 'VERSION', 'MIGRATIONS':
            self.useFixture(fixtures.MonkeyPatch(
                f'nova_accel.store.schema.{name}', getattr(schema, name)))
        exec(self.STEP, {})

    def test_stores_of_commits_before_the_first_release(self):
        """They are refused, and stay as they are."""
        # now, and not when its memory is freed: the file changes
        claim_store.ClaimStore(self.path)._db.close()
        for version in range(schema.VERSION):
            with self.file() as db:
                db.execute(f'PRAGMA user_version = {version}')
            before = self.content()
            for open_ in (claim_store.ClaimStore, claim_store.copy_of,
                          claim_store.existing):
                self.assertUnavailable(
                    f'has version {version}, which a commit before the first '
                    f'release wrote, and no release can read it: move it away',
                    open_, self.path)
            self.assertEqual(before, self.content())

    def test_tables_of_this_version(self):
        """A commit that changes them increases VERSION, and writes the number
        and the digest here."""
        tables = ' '.join(' '.join(schema.SCHEMA).split())
        self.assertEqual((26, '7f60f66d1765'), (
            schema.VERSION, hashlib.sha256(tables.encode()).hexdigest()[:12]))

    def test_file_without_tables(self):
        sqlite3.connect(self.path).close()
        self.assertEqual([], claim_store.ClaimStore(self.path).claims())
        self.assertEqual(schema.VERSION, self.schema()[1])

    def test_next_release(self):
        one = claim(serial='S1')
        store = claim_store.ClaimStore(self.path)
        store.add([one])
        store.disable(DISABLED)
        self.next_release()
        log = self.useFixture(fixtures.FakeLogger())
        for open_ in (claim_store.copy_of, claim_store.ClaimStore,
                      claim_store.ClaimStore, claim_store.existing):
            again = open_(self.path)
            self.assertEqual(([one], (DISABLED,)),
                             (again.claims(), again.disabled()))
        self.assertEqual(1, log.output.count(
            f'has version {schema.VERSION - 1} and gets version '
            f'{schema.VERSION}'))
        self.assertEqual(schema.VERSION, self.schema()[1])
        with self.file() as db:
            self.assertEqual(('S1',), db.execute(
                'SELECT more FROM claims').fetchone())

    def test_a_migration_that_fails_changes_nothing(self):
        claim_store.ClaimStore(self.path).add([claim()])
        before = self.schema()
        self.next_release()

        def broken(db):
            step(db)
            db.execute('SELECT * FROM missing')
        (version, step), = schema.MIGRATIONS.items()
        with mock.patch.dict(schema.MIGRATIONS, {version: broken}):
            self.assertUnavailable('no such table: missing',
                                   claim_store.ClaimStore, self.path)
        self.assertEqual(before, self.schema())
        self.assertEqual(1, len(claim_store.ClaimStore(self.path).claims()))

    def test_killed_in_a_migration(self):
        """After each of its statements, until one more lets it end."""
        program = self.STEP + textwrap.dedent('''
            import os, signal, sqlite3, sys
            from nova_accel.store import claim_store
            class Connection(sqlite3.Connection):
                left = 0
                def execute(self, *args):
                    if self.in_transaction:
                        self.left -= 1
                        if not self.left:
                            os.kill(os.getpid(), signal.SIGKILL)
                    return super().execute(*args)
            connect = sqlite3.connect
            sqlite3.connect = lambda *args, **kwargs: connect(
                *args, **kwargs, factory=Connection)
            # forked: to start Python takes longer than all of the rest
            for line in sys.stdin:
                Connection.left = int(line)
                child = os.fork()
                if not child:
                    claim_store.ClaimStore(sys.argv[1])
                    os._exit(0)
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
                      flush=True)
        ''')
        process = subprocess.Popen(
            [sys.executable, '-c', program, self.path], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(process.communicate)

        def open_until(statement):
            process.stdin.write(f'{statement}\n')
            process.stdin.flush()
            return int(process.stdout.readline())
        claim_store.ClaimStore(self.path).add([claim()])
        before = self.schema()
        for number in itertools.count(1):
            ended = open_until(number)
            if not ended:
                break
            self.assertEqual(-signal.SIGKILL, ended)
            self.assertEqual(before, self.schema())
        self.assertGreater(number, 5)
        self.assertNotEqual(before, self.schema())
        self.next_release()
        self.assertEqual(1, len(claim_store.ClaimStore(self.path).claims()))

    def test_store_of_a_later_release(self):
        with self.file() as db:
            db.execute('CREATE TABLE claims (colour TEXT)')
            db.execute(f'PRAGMA user_version = {schema.VERSION + 1}')
        with open(self.path, 'rb') as file:
            before = file.read()
        self.assertUnavailable(
            f'has version {schema.VERSION + 1}, and this release of '
            f'nova_accel knows no later one than {schema.VERSION}: install',
            claim_store.ClaimStore, self.path)
        with open(self.path, 'rb') as file:
            self.assertEqual(before, file.read())

    def test_columns_and_fields_that_are_not_known(self):
        store = claim_store.ClaimStore(self.path)
        one = claim()
        store.add([one])
        with self.file() as db:
            for table in ('claims', 'cards', 'regions', 'ledger'):
                db.execute(f'ALTER TABLE {table} ADD COLUMN more TEXT')
            db.execute('UPDATE claims SET handle = ?', (json.dumps(
                {'type': 'PCI', 'address': HANDLE.address, 'colour': 'red'}),))
            db.execute(
                'INSERT INTO cards (address, serial, ids, placed, device) '
                "VALUES (?, '', '', 1, ?)",
                ('0000:01:00.0', json.dumps({
                    'type': 'FPGA', 'colour': 'red', 'regions': [
                        {'index': 1, 'size': 3, 'handles': [
                            {'type': 'PCI', 'address': 'x', 'slot': 1}]}],
                    'creatable': [{'name': 'n', 'speed': 3}]})))
        self.assertEqual([one], store.claims())
        store.add([claim(handle=handle(1))])
        store.set_loaded('a', 0, LOADED)
        store.set_reserved({('p', 'VGPU'): values.Reserved(1, 1)})
        self.assertEqual({('a', 0): LOADED}, store.loaded())
        device = store.devices()['0000:01:00.0']
        self.assertEqual(model.Device(
            address='0000:01:00.0', type='FPGA', vendor='', product='',
            vendor_id='', product_id='', driver='', regions=(model.Region(
                index=1, region_type_uuid=None, function_uuid=None,
                handles=(model.AttachHandle(model.HandleType.PCI, 'x'),)),),
            creatable=(model.CreatableType('n', '', 0),)), device)
        store.set_devices({device.address: device})

    def test_values_that_are_not_known(self):
        """A claim that cannot be understood is not left out: a server has it.
        """
        store = claim_store.ClaimStore(self.path)
        store.add([claim(state=BOUND)])
        store.set_devices({DEVICE.address: DEVICE})
        with self.file() as db:
            db.execute('UPDATE cards SET device = ?', (
                json.dumps({'health': 'tired'}),))
        self.assertUnavailable("'tired' is not a valid Health",
                               claim_store.ClaimStore(self.path).devices)
        for column, kind in (('state', 'ClaimState'),
                             ('handle_type', 'HandleType')):
            with self.file() as db:
                db.execute(f"UPDATE claims SET {column} = 'CXL'")
            self.assertUnavailable(f"'CXL' is not a valid {kind}",
                                   lambda: claim_store.ClaimStore(self.path))
            with self.file() as db:
                db.execute("UPDATE claims SET state = 'Bound'")


class NoFileTest(StoreTestCase):

    def test_refused(self):
        """As --store <(zcat copy.gz); a pipe would be waited for."""
        for make, remove in (os.mkfifo, os.unlink), (os.mkdir, os.rmdir):
            make(self.path)
            for use in claim_store.copy_of, claim_store.existing:
                self.assertUnavailable('is not a file: name the file', use,
                                       self.path)
            remove(self.path)


class DisabledTest(StoreTestCase):
    """A command writes while nova-compute has the store open."""

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(self.path)

    def command(self):
        return claim_store.existing(self.path)

    def test_heard(self):
        self.assertFalse(self.store.refresh())
        before = self.store.generation
        self.command().disable(DISABLED)
        self.assertEqual((), self.store.disabled())
        self.assertTrue(self.store.refresh())
        self.assertEqual((DISABLED,), self.store.disabled())
        self.assertNotEqual(before, self.store.generation)
        self.assertFalse(self.store.refresh())
        later = dataclasses.replace(DISABLED, serial='', reason='other')
        self.command().disable(later, instead=[DISABLED])
        self.assertTrue(self.store.refresh())
        self.assertEqual((later,), self.store.disabled())
        self.command().enable([later])
        self.assertTrue(self.store.refresh())
        self.assertEqual((), self.store.disabled())

    def test_own_writes_are_nothing_new(self):
        before = self.store.generation
        self.assertFalse(self.store.refresh())
        self.store.set_reserved({('p', 'VGPU'): values.Reserved(1, 1)})
        self.assertFalse(self.store.refresh())
        self.assertEqual(before, self.store.generation)

    def test_no_claim_follows(self):
        """Also where nova-compute has not looked yet."""
        other = claim(device_address='0000:af:00.0', handle=handle(0))
        self.command().disable(dataclasses.replace(DISABLED, serial=''))
        error = self.assertRaises(exception.DeviceUnavailable,
                                  self.store.add, [other, claim()])
        self.assertIn('which the operator has disabled', str(error))
        # it is for those who may not know why
        self.assertNotIn(DISABLED.reason, str(error))
        self.assertEqual([], self.store.claims())
        self.store.add([other])
        self.command().enable(self.command().disabled())
        self.store.add([claim()])

    def test_serial_numbers(self):
        self.command().disable(DISABLED)
        for serial, address, means in (
                ('S1', '0000:5e:00.0', True), ('S1', '0000:01:00.0', True),
                ('', '0000:5e:00.0', True), ('', '0000:01:00.0', False),
                ('S2', '0000:5e:00.0', False)):
            self.assertEqual(means, DISABLED.card.means(
                model.CardKey(address, serial)))
        self.assertRaises(
            exception.DeviceUnavailable, self.store.add,
            [claim(device_address='0000:01:00.0', serial='S1')])
        self.store.add([claim(serial='S2')])

    def test_what_a_server_has_is_found_again(self):
        """A store that was lost does not lose what a server has."""
        self.command().disable(DISABLED)
        self.store.settle(claims=[claim(state=BOUND)])
        self.assertEqual(1, len(self.store.claims()))

    def test_stores_that_a_command_does_not_write(self):
        for version, words in (
                (schema.VERSION - 1, 'start nova-compute of the same release'),
                (schema.VERSION + 1, 'install the release that wrote it')):
            with self.file() as db:
                db.execute(f'PRAGMA user_version = {version}')
            with mock.patch.object(schema, 'MIGRATIONS',
                                   {schema.VERSION - 1: None}):
                error = self.assertRaises(
                    exception.AcceleratorsUnavailable, self.command)
            self.assertIn(f'{self.path} has version {version}', str(error))
            self.assertIn(words, str(error))
            self.assertRegex(str(error), r'[^.]\.\Z')
            with self.file() as db:
                self.assertEqual((version,), db.execute(
                    'PRAGMA user_version').fetchone())
        os.remove(self.path)
        self.assertUnavailable('does not exist: nova-compute creates it',
                               self.command)
        self.assertFalse(os.path.exists(self.path))
