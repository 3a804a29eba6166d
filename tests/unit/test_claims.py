# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One handle, one server, whatever happens to the process; and stores of
other releases."""

import contextlib
import dataclasses
import datetime
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

HANDLE = model.AttachHandle(model.HandleType.PCI, '0000:5e:00.0')
RELEASE_0_1 = os.path.join(os.path.dirname(__file__), 'data',
                           'claims-0.1.sql')
VERSION_1 = os.path.join(os.path.dirname(__file__), 'data',
                         'claims-1.sql')
VERSION_3 = os.path.join(os.path.dirname(__file__), 'data',
                         'claims-3.sql')
BOUND = model.ClaimState.BOUND
PROJECT = 'a project'
LOADED = model.Loaded('b' * 32, str(uuid.uuid4()), None, 'sha512-0', PROJECT)
DEVICE = model.Device(
    address='0000:5e:00.0', type='FPGA', vendor='INTEL',
    product='PAC_ARRIA10', vendor_id='8086', product_id='09c4',
    driver='dfl', traits=('CUSTOM_X',),
    creatable=(model.CreatableType('nvidia-558', 'CUSTOM_Y', 3),),
    regions=(model.Region(
        index=0, region_type_uuid='a' * 32, function_uuid=None,
        handles=(HANDLE,), health=model.Health.GONE, reason='so'),))

DISABLED = model.Disabled('0000:5e:00.0', 'S1', 'it is hot',
                          '2026-11-22T02:17:43+00:00')


def unknown(origin):
    """What a region carries whose programming has not come to its end."""
    return model.Loaded(None, None, None, None, origin)


def claim(instance=None, handle=HANDLE, **more):
    instance = instance or str(uuid.uuid4())
    return model.Claim(**{
        'uuid': str(uuid.uuid4()), 'instance_uuid': instance,
        'consumer_uuid': instance,
        'role': model.Role.CURRENT, 'provider_uuid': str(uuid.uuid4()),
        'resource_class': 'CUSTOM_ACCELERATOR_FPGA', 'group': '1',
        'device_address': '0000:5e:00.0', 'region_index': 0,
        'handle': handle, **more})


def handle(number):
    return model.AttachHandle(model.HandleType.PCI, f'0000:af:00.{number}')


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
            serial='S1', asked='{"keys": {}}', remembered='[1]',
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
            [one], state=model.ClaimState.BIND_FAILED, error='why',
            restore_function='a' * 32, prepared=True, group='_B')
        self.assertEqual(
            (model.ClaimState.BIND_FAILED, 'why', 'a' * 32, True, '_B'),
            (changed.state, changed.error, changed.restore_function,
             changed.prepared, changed.group))
        self.assertEqual([changed], claim_store.ClaimStore(self.path).claims())

    def test_new_file(self):
        """The host may have had another one; a store without a file cannot
        be lost."""
        self.assertEqual({model.EVERYTHING}, self.store.unsettled())
        self.assertEqual({model.EVERYTHING},
                         claim_store.ClaimStore(self.path).unsettled())
        self.assertEqual(frozenset(),
                         claim_store.ClaimStore(':memory:').unsettled())

    def test_records(self):
        self.assertEqual({}, self.store.records())
        for value in '1', '2':
            record = (('serial number', 'S1'), ('firmware', value))
            self.store.keep_record('S1', record)
        for store in (self.store, claim_store.ClaimStore(self.path)):
            self.assertEqual({'S1': record}, store.records())

    def test_settle(self):
        one, other = (model.Unsettled(address='0000:5e:00.0'),
                      model.Unsettled(serial='S1'))
        before = self.store.generation
        self.store.settle([model.EVERYTHING], [one, other])
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
        one, other = (model.Unsettled(address='0000:5e:00.0'),
                      model.Unsettled(serial='S1'))

        def late():
            self.store.settle([model.EVERYTHING], [other])
            yield one
        self.store.settle(todo=late())
        for store in (self.store, claim_store.ClaimStore(self.path)):
            self.assertEqual({one, other}, store.unsettled())

    def test_origins_of_cards(self):
        for origin in ('p', None, model.SOME_PROJECT):
            self.store.set_origin('S1', 0, origin)
            self.store.set_origin('S1', 1, 'q')
            self.store.set_origin('S2', 0, 'r')
            self.store.set_origin('S2', 0, model.OPERATOR)
            for store in (self.store, claim_store.ClaimStore(self.path)):
                self.assertEqual({('S1', 0): origin, ('S1', 1): 'q'},
                                 store.origins())

    def test_products_that_come_back(self):
        """Several that were in one slot, without serial numbers."""
        rows = {model.Unsettled('0000:5e:00.0', ids=ids)
                for ids in ('', '10de:2330', '1002:74a1 1002:0c34')}
        self.store.settle([model.EVERYTHING], rows)
        for store in (self.store, claim_store.ClaimStore(self.path)):
            self.assertEqual(rows, store.unsettled())

    def test_parts_that_are_settled(self):
        rows = {model.Unsettled('0000:5e:00.0', but_for=frozenset(parts))
                for parts in ((), ('0',), ('0000:5e:00.1', '0000:5e:00.2'))}
        self.store.settle([model.EVERYTHING], rows)
        for store in (self.store, claim_store.ClaimStore(self.path)):
            self.assertEqual(rows, store.unsettled())

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
        self.store.update([one], role=model.Role.OLD)
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
                          (DEVICE.address, 1): LOADED}, self.store.loaded())
        again.drop_loaded(DEVICE.address, 0)
        again.drop_loaded(DEVICE.address, 2)
        self.assertEqual({(DEVICE.address, 1): LOADED}, self.store.loaded())

    def test_origins(self):
        """What the driver reads has one too; unknown is another thing."""
        for origin in (model.OPERATOR, PROJECT, model.SOME_PROJECT, None):
            for loaded in (unknown(origin),
                           dataclasses.replace(LOADED, origin=origin),
                           model.Loaded(None, None, None, '', origin)):
                self.store.set_loaded(DEVICE.address, 0, loaded)
                self.assertEqual({(DEVICE.address, 0): loaded},
                                 claim_store.ClaimStore(self.path).loaded())
        # nothing was read back after the programming
        self.store.set_loaded(DEVICE.address, 0, dataclasses.replace(
            LOADED, function_uuid=None))
        self.assertEqual({(DEVICE.address, 0): unknown(LOADED.origin)},
                         self.store.loaded())

    def test_reserved(self):
        self.assertEqual({}, self.store.reserved())
        self.store.set_reserved('p', 'CUSTOM_ACCELERATOR_FPGA', 2)
        self.store.set_reserved('p', 'VGPU', 0)
        self.store.set_reserved('p', 'VGPU', 1)
        again = claim_store.ClaimStore(self.path)
        self.assertEqual({('p', 'CUSTOM_ACCELERATOR_FPGA'): 2,
                          ('p', 'VGPU'): 1}, again.reserved())
        again.drop_reserved('p', 'VGPU')
        again.drop_reserved('q', 'VGPU')
        self.assertEqual({('p', 'CUSTOM_ACCELERATOR_FPGA'): 2},
                         self.store.reserved())

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
            for table in ('claims', 'devices', 'loaded', 'reserved'):
                db.execute(f'DROP TABLE {table}')
        # claims are known without the file: plain servers do not need it
        self.assertEqual([one], store.claims())
        for call in (store.devices, store.loaded, store.reserved,
                     lambda: store.add([one]), lambda: store.remove([one]),
                     lambda: store.update([one], error='x'),
                     lambda: store.set_devices({}),
                     lambda: store.set_loaded('a', 0, LOADED),
                     lambda: store.drop_loaded('a', 0),
                     lambda: store.set_reserved('p', 'VGPU', 1),
                     lambda: store.drop_reserved('p', 'VGPU')):
            self.assertUnavailable('no such table', call)

    def test_rows_that_are_no_json(self):
        store = claim_store.ClaimStore(self.path)
        store.add([claim()])
        store.set_devices({DEVICE.address: DEVICE})
        for text in ('', '{', '[]', '3', 'null', '{"regions": [3]}'):
            with self.file() as db:
                db.execute('UPDATE devices SET device = ?', (text,))
            self.assertUnavailable('table devices', store.devices)
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
        return model.Handover(**{
            'time': '2025-11-22T02:17:43+00:00',
            'device': '0000:5e:00.0', 'serial': '',
            'handle': '0000:5e:00.0', 'server': str(number), **more})

    def test_round_trip(self):
        one = self.handover(
            1, serial='s', origin='o', method='m', before='b', after='a',
            result='r')
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

    def test_only_its_user_reads_it(self):
        for suffix in '', '-wal', '-shm':
            self.assertEqual(0o600, stat.S_IMODE(
                os.stat(self.path + suffix).st_mode))
        # also one that an earlier release made
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


class PoolsTest(StoreTestCase):

    def test_pools(self):
        """With what waits, in one transaction."""
        self.store = claim_store.ClaimStore(self.path)
        self.assertEqual({}, self.store.pools())
        one, two = model.Reserved(1, 2, 3), model.Reserved(0, 0, 1)
        waits = model.Waiting(
            model.AttachHandle(model.HandleType.PCI, 'd'), 'd', None)
        self.store.change_waiting(
            add=[waits], pools=[('p', two), ('q', two), ('p', one)])
        again = claim_store.ClaimStore(self.path)
        self.assertEqual({'p': one, 'q': two}, again.pools())
        seen = dataclasses.replace(waits, shown=True, provider_uuid='p')
        again.change_waiting(shown=[seen], pools=[('q', None)])
        last = claim_store.ClaimStore(self.path)
        self.assertEqual(({'p': one}, (seen,)),
                         (last.pools(), last.waiting()))


class WaitingTest(StoreTestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(self.path)
        self.one, self.two = (model.Waiting(
            handle(n), '0000:af:00.0', n - 1 or None) for n in (1, 2))

    def assertWaiting(self, *waiting):
        self.assertEqual(waiting, self.store.waiting())
        self.assertEqual(waiting, claim_store.ClaimStore(self.path).waiting())

    def test_changes(self):
        self.assertWaiting()
        before = self.store.generation
        self.store.change_waiting(add=[self.two])
        self.assertNotEqual(before, self.store.generation)
        self.store.change_waiting(add=[self.one], shown=[self.two])
        seen = dataclasses.replace(self.two, shown=True)
        self.assertWaiting(seen, self.one)
        # a release that is tried again does not hide what is shown
        self.store.change_waiting(add=[self.two])
        self.assertWaiting(seen, self.one)
        self.store.change_waiting(remove=[seen])
        self.assertWaiting(self.one)
        # what has been given back meanwhile
        self.store.change_waiting(shown=[self.two], remove=[self.two])
        self.assertWaiting(self.one)

    def test_nothing_changes_where_it_cannot_be_written(self):
        self.store.change_waiting(add=[self.one])
        with self.file() as db:
            db.execute('DROP TABLE waiting')
        self.assertUnavailable('no such table', self.store.change_waiting,
                               add=[self.two])
        self.assertEqual((self.one,), self.store.waiting())

    def test_values_that_make_no_sense(self):
        self.store.change_waiting(add=[self.one])
        with self.file() as db:
            db.execute("UPDATE waiting SET handle_type = 'X'")
        self.assertUnavailable('table waiting',
                               lambda: claim_store.ClaimStore(self.path))


class OtherReleasesTest(StoreTestCase):

    def release_0_1(self):
        with open(RELEASE_0_1, encoding='utf-8') as file, self.file() as db:
            db.executescript(file.read())

    @staticmethod
    def uuid(number):
        return f'0e1c3a52-7d64-4a0b-9f1e-{number:012}'

    def schema(self):
        """Names of tables -> names and kinds of their columns."""
        with self.file() as db:
            return {name: (
                db.execute(f'PRAGMA table_info({name})').fetchall(),
                db.execute(f'PRAGMA index_list({name})').fetchall())
                for name, in db.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'")
            }, db.execute('PRAGMA user_version').fetchone()

    def test_release_0_1(self):
        self.release_0_1()
        store = claim_store.ClaimStore(self.path)
        found = {c.uuid: c for c in store.claims()}
        self.assertEqual({self.uuid(n) for n in range(1, 8)}, set(found))
        fpga, gpu, bound, initial, provisioning, deleting, nvme = (
            found[self.uuid(n)] for n in range(1, 8))
        self.assertEqual(model.Claim(
            uuid=self.uuid(1), instance_uuid=self.uuid(101),
            role=model.Role.CURRENT, provider_uuid=self.uuid(201),
            resource_class='CUSTOM_ACCELERATOR_FPGA', group='1',
            device_address='0000:5e:00.0', region_index=0, handle=HANDLE,
            consumer_uuid=self.uuid(101), state=BOUND,
            restore_function='d8424dc4a4a3c413f89e433683f9040b',
            restore_bitstream=self.uuid(401), prepared=True,
            operators_bitstream=self.uuid(401)), fpga)
        self.assertEqual(
            (model.Role.OLD, self.uuid(500), False, ('0000:86:00.1',)),
            (gpu.role, gpu.consumer_uuid, gpu.handle.managed,
             gpu.handle.companions))
        self.assertEqual('0000:3b:00.4', bound.handle.parent)
        # release() is called where 0.1 would have called it
        self.assertEqual(
            [True, False, True, False, True, True, True],
            [c.prepared for c in (fpga, gpu, bound, initial, provisioning,
                                  deleting, nvme)])
        self.assertEqual((model.ClaimState.DELETING, 'busy'),
                         (deleting.state, deleting.error))
        self.assertEqual(
            {('0000:5e:00.0', 0): model.Loaded(
                'd8424dc4a4a3c413f89e433683f9040b', self.uuid(401), 'nlb',
                'sha512-0'),
             ('0000:af:00.0', 1): model.Loaded(
                'd8424dc4a4a3c413f89e433683f9040b', self.uuid(401), None,
                'sha512-0')}, store.loaded())
        self.assertEqual(({}, (), []), (
            store.reserved(), store.waiting(), store.handovers()))
        card, gpus = (store.devices()[address] for address in (
            '0000:5e:00.0', '0000:3b:00.0'))
        self.assertEqual(('ARRIA10', ('CUSTOM_FPGA_INTEL',), 'nlb'), (
            card.family, card.traits, card.region(0).function_name))
        self.assertEqual((HANDLE,), card.region(0).handles)
        self.assertEqual((model.Health.GONE, (model.CreatableType(
            'nvidia-558', 'CUSTOM_VGPU_NVIDIA_558', 11),)),
            (gpus.health, gpus.creatable))
        # what has another name now
        self.assertTrue(card.region(0).guest_can_reprogram)
        self.assertEqual(('CUSTOM_VGPU_NVIDIA_558',), gpus.state_traits)
        # all that this release writes finds its place
        store.set_loaded('0000:5e:00.0', 0, unknown(None))
        self.assertEqual(unknown(None), store.loaded()['0000:5e:00.0', 0])
        store.add([claim(handle=handle(3))])
        store.update([fpga], error='x')
        store.set_reserved('p', 'VGPU', 1)
        # and the next start finds nothing to do
        self.assertEqual(8, len(claim_store.ClaimStore(self.path).claims()))

    def test_version_1(self):
        """From where something is, it does not say."""
        with open(VERSION_1, encoding='utf-8') as file, self.file() as db:
            db.executescript(file.read())
        store = claim_store.ClaimStore(self.path)
        self.assertEqual(
            {('0000:5e:00.0', 0): model.Loaded(
                'd8424dc4a4a3c413f89e433683f9040b', self.uuid(401), 'nlb',
                'sha512-0', None),
             # a programming was broken off, maybe with a tenant's image
             ('0000:af:00.0', 1): unknown(model.SOME_PROJECT)},
            store.loaded())
        self.assertEqual({('p', 'VGPU'): 1}, store.reserved())
        one, = store.claims()
        self.assertEqual(
            (BOUND, self.uuid(401), None, None, True, self.uuid(401)),
            (one.state, one.restore_bitstream, one.restore_origin,
             one.project_id, one.prepared, one.operators_bitstream))
        self.assertEqual(('', frozenset()), (one.serial, store.unsettled()))
        store.update([one], restore_origin=model.OPERATOR, project_id='p',
                     serial='S1')
        one, = claim_store.ClaimStore(self.path).claims()
        self.assertEqual((model.OPERATOR, 'p', 'S1'),
                         (one.restore_origin, one.project_id, one.serial))

    def test_migrated_and_made_anew_are_the_same(self):
        self.release_0_1()
        claim_store.ClaimStore(self.path)
        migrated = self.schema()
        os.remove(self.path)
        with open(VERSION_1, encoding='utf-8') as file, self.file() as db:
            db.executescript(file.read())
        claim_store.ClaimStore(self.path)
        self.assertEqual(self.schema(), migrated)
        os.remove(self.path)
        claim_store.ClaimStore(self.path)
        self.assertEqual(self.schema(), migrated)
        self.assertEqual((schema.VERSION,), migrated[1])

    def test_a_migration_that_fails_changes_nothing(self):
        self.release_0_1()
        before = self.schema()

        def broken(db):
            schema._from_release_0_1(db)
            db.execute('SELECT * FROM missing')
        with mock.patch.object(schema, 'MIGRATIONS', (broken,)):
            self.assertUnavailable('no such table: missing',
                                   claim_store.ClaimStore, self.path)
        self.assertEqual(before, self.schema())
        self.assertEqual(7, len(claim_store.ClaimStore(self.path).claims()))

    def test_killed_in_a_migration(self):
        self.release_0_1()
        program = textwrap.dedent('''
            import os, signal, sys
            from nova_accel.store import claim_store, schema
            migrate = schema._from_release_0_1
            def killed(db):
                migrate(db)
                os.kill(os.getpid(), signal.SIGKILL)
            schema.MIGRATIONS = (killed,)
            claim_store.ClaimStore(sys.argv[1])
        ''')
        self.assertEqual(-signal.SIGKILL, subprocess.call(
            [sys.executable, '-c', program, self.path]))
        self.assertEqual(7, len(claim_store.ClaimStore(self.path).claims()))

    def test_back_to_release_0_1_and_again_to_this(self):
        """As docs/source/operators.rst says."""
        self.release_0_1()
        store = claim_store.ClaimStore(self.path)
        store.set_loaded('0000:5e:00.0', 0, unknown(None))
        with self.file() as db:
            db.executescript('DELETE FROM devices; '
                             'DELETE FROM loaded WHERE function_uuid IS NULL; '
                             'ALTER TABLE loaded DROP COLUMN origin; '
                             'ALTER TABLE claims DROP COLUMN restore_origin; '
                             'ALTER TABLE claims DROP COLUMN project_id; '
                             'ALTER TABLE claims DROP COLUMN serial; '
                             'ALTER TABLE claims DROP COLUMN asked; '
                             'ALTER TABLE claims DROP COLUMN remembered; '
                             'ALTER TABLE claims DROP COLUMN ids; '
                             'ALTER TABLE claims DROP COLUMN '
                             'operators_bitstream; '
                             'ALTER TABLE claims DROP COLUMN since; '
                             'PRAGMA user_version = 0')
            # what 0.1 does: by position
            row, = db.execute('SELECT * FROM claims WHERE state = ? AND '
                              'created_type IS NOT NULL', ('Bound',))
            self.assertEqual(('nvidia-558', 1), row[16:])
            new = [self.uuid(n) for n in (8, 108)]
            db.execute(f'INSERT INTO claims VALUES ({", ".join("?" * 18)})',
                       (*new, *row[2:9], self.uuid(308), *row[10:17], 0))
            db.execute('INSERT INTO devices VALUES (?, ?)', ('a', '{}'))
            db.execute('INSERT INTO loaded VALUES (?, ?, ?, ?, ?, ?)',
                       ('0000:5e:00.0', 0, 'f', 'b', None, 'c'))
        again = claim_store.ClaimStore(self.path)
        self.assertEqual(8, len(again.claims()))
        self.assertTrue(again.by_uuid(new)[0].prepared)
        self.assertEqual('f', again.loaded()['0000:5e:00.0', 0].function_uuid)

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
            for table in ('claims', 'devices', 'loaded', 'reserved'):
                db.execute(f'ALTER TABLE {table} ADD COLUMN more TEXT')
            db.execute('UPDATE claims SET handle = ?', (json.dumps(
                {'type': 'PCI', 'address': HANDLE.address, 'colour': 'red'}),))
            db.execute(
                'INSERT INTO devices (address, device) VALUES (?, ?)',
                ('0000:01:00.0', json.dumps({
                    'type': 'FPGA', 'colour': 'red', 'regions': [
                        {'index': 1, 'size': 3, 'handles': [
                            {'type': 'PCI', 'address': 'x', 'slot': 1}]}],
                    'creatable': [{'name': 'n', 'speed': 3}]})))
        self.assertEqual([one], store.claims())
        store.add([claim(handle=handle(1))])
        store.set_loaded('a', 0, LOADED)
        store.set_reserved('p', 'VGPU', 1)
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
        store = claim_store.ClaimStore(self.path)
        one = claim(state=BOUND)
        store.add([one])
        store.set_devices({DEVICE.address: DEVICE})
        with self.file() as db:
            db.execute("UPDATE claims SET state = 'Paused', role = 'lent'")
            db.execute('UPDATE devices SET device = ?', (json.dumps({
                'health': 'tired', 'handles': [
                    {'type': 'CXL', 'address': 'x'},
                    {'type': 'PCI', 'address': 'y'}],
                'regions': [{'index': 0, 'health': 'bored',
                             'reason': 'so'}]}),))
        store = claim_store.ClaimStore(self.path)
        found, = store.claims()
        self.assertEqual(
            (model.ClaimState.UNKNOWN, model.Role.CURRENT,
             'state Paused is of another release'),
            (found.state, found.role, found.error))
        device = store.devices()[DEVICE.address]
        quarantined = model.Health.QUARANTINED
        self.assertEqual(
            (quarantined, 'its health tired is of another release', ('y',)),
            (device.health, device.reason,
             tuple(h.address for h in device.handles)))
        self.assertEqual((quarantined, 'so'), (
            device.region(0).health, device.region(0).reason))
        # a claim that cannot be understood is not left out: somebody holds it
        with self.file() as db:
            db.execute("UPDATE claims SET handle_type = 'CXL'")
        self.assertUnavailable("'CXL' is not a valid HandleType",
                               lambda: claim_store.ClaimStore(self.path))

    def test_version_3(self):
        """It does not know what the operator disables."""
        with open(VERSION_3, encoding='utf-8') as file, self.file() as db:
            db.executescript(file.read())
            for address, text in (('0000:5e:00.0', '{"serial": "S9"}'),
                                  ('0000:5f:00.0', '{')):
                db.execute('INSERT OR REPLACE INTO devices VALUES (?, ?)',
                           (address, text))
        store = claim_store.ClaimStore(self.path)
        one, = store.claims()
        self.assertEqual((BOUND, 'S1', 'p', '', ''),
                         (one.state, one.serial, one.project_id, one.asked,
                          one.remembered))
        self.assertEqual(
            ({('0000:5e:00.0', 0): unknown(model.SOME_PROJECT)},
             {'p': model.Reserved(1, 2, 3)},
             {model.Unsettled(serial='S2')}, ('0000:af:00.1',)),
            (store.loaded(), store.pools(), store.unsettled(),
             tuple(w.handle.address for w in store.waiting())))
        # nor whose content goes with a card
        self.assertEqual({('S9', 0): model.SOME_PROJECT}, store.origins())
        self.assertEqual((), store.disabled())
        store.disable(DISABLED)
        self.assertEqual((DISABLED,),
                         claim_store.ClaimStore(self.path).disabled())
        migrated = self.schema()
        os.remove(self.path)
        claim_store.ClaimStore(self.path)
        self.assertEqual(self.schema(), migrated)


class DisabledTest(StoreTestCase):
    """A command writes while nova-compute has the store open."""

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(self.path)

    def command(self):
        return claim_store.existing(self.path)

    def test_heard(self):
        self.assertFalse(self.store.look())
        before = self.store.generation
        self.command().disable(DISABLED)
        self.assertEqual((), self.store.disabled())
        self.assertTrue(self.store.look())
        self.assertEqual((DISABLED,), self.store.disabled())
        self.assertNotEqual(before, self.store.generation)
        self.assertFalse(self.store.look())
        later = dataclasses.replace(DISABLED, serial='', reason='other')
        self.command().disable(later, instead=[DISABLED])
        self.assertTrue(self.store.look())
        self.assertEqual((later,), self.store.disabled())
        self.command().enable([later])
        self.assertTrue(self.store.look())
        self.assertEqual((), self.store.disabled())

    def test_own_writes_are_nothing_new(self):
        before = self.store.generation
        self.assertFalse(self.store.look())
        self.store.set_reserved('p', 'VGPU', 1)
        self.assertFalse(self.store.look())
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
            self.assertEqual(means, DISABLED.means(address, serial))
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
            error = self.assertRaises(
                exception.AcceleratorsUnavailable, self.command)
            self.assertIn(f'{self.path} has version {version}', str(error))
            self.assertIn(words, str(error))
            self.assertRegex(str(error), r'[^.]\.\Z')
            with self.file() as db:
                self.assertEqual((version,), db.execute(
                    'PRAGMA user_version').fetchone())
        os.remove(self.path)
        self.assertUnavailable('does not exist: nova-compute makes it',
                               self.command)
        self.assertFalse(os.path.exists(self.path))
