# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One handle, one server, whatever happens to the process."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import uuid

import fixtures
import testtools

from nova_accel import exception
from nova_accel import model
from nova_accel.virt import claims

HANDLE = model.AttachHandle(model.HandleType.PCI, '0000:5e:00.0')


def claim(instance=None, handle=HANDLE, **more):
    instance = instance or str(uuid.uuid4())
    return model.Claim(**{
        'uuid': str(uuid.uuid4()), 'instance_uuid': instance,
        'consumer_uuid': instance,
        'role': model.Role.CURRENT, 'provider_uuid': str(uuid.uuid4()),
        'resource_class': 'CUSTOM_ACCELERATOR_FPGA', 'group': '1',
        'device_address': '0000:5e:00.0', 'region_index': 0,
        'handle': handle, **more})


class ClaimStoreTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'claims.sqlite')
        self.store = claims.ClaimStore(self.path)

    def test_round_trip(self):
        one = claim()
        self.store.add([one])
        self.assertEqual([one], self.store.claims())
        self.assertEqual([one], self.store.claims(one.instance_uuid))
        self.assertEqual([], self.store.claims(str(uuid.uuid4())))
        self.store.update([one], state=model.ClaimState.BIND_FAILED,
                          error='why', function_uuid='a' * 32,
                          prepared=True)
        found, = claims.ClaimStore(self.path).claims()
        self.assertEqual(
            (model.ClaimState.BIND_FAILED, 'why', 'a' * 32, True),
            (found.state, found.error, found.function_uuid, found.prepared))
        self.store.remove([one])
        self.assertEqual([], self.store.claims())

    def test_second_server_is_refused_and_all_of_its_claims(self):
        holder = claim()
        self.store.add([holder])
        other = model.AttachHandle(model.HandleType.PCI, '0000:af:00.0')
        second = str(uuid.uuid4())
        error = self.assertRaises(
            exception.ClaimConflict, self.store.add,
            [claim(second, other), claim(second)])
        self.assertIn(holder.instance_uuid, str(error))
        self.assertEqual([holder], self.store.claims())

    def test_one_of_many_threads_wins(self):
        won = []

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

    def test_devices_and_what_they_carry(self):
        device = model.Device(
            address='0000:5e:00.0', type='FPGA', vendor='INTEL',
            product='PAC_ARRIA10', vendor_id='8086', product_id='09c4',
            driver='dfl', traits=('CUSTOM_X',), regions=(model.Region(
                index=0, region_type_uuid='a' * 32, function_uuid=None,
                handles=(HANDLE,), health=model.Health.GONE, reason='so'),))
        self.store.set_devices({device.address: device})
        loaded = model.Loaded('b' * 32, str(uuid.uuid4()), None, 'sha512-0')
        self.store.set_loaded(device.address, 0, loaded)
        again = claims.ClaimStore(self.path)
        self.assertEqual({device.address: device}, again.devices())
        self.assertEqual({(device.address, 0): loaded}, again.loaded())
        again.set_loaded(device.address, 0, None)
        self.assertEqual({}, self.store.loaded())

    def test_killed_in_the_middle_of_a_transaction(self):
        holder = claim()
        self.store.add([holder])
        program = textwrap.dedent('''
            import sys, os
            from nova_accel.virt import claims
            store = claims.ClaimStore(sys.argv[1])
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

    def test_unusable_file(self):
        with open(self.path + '.bad', 'wb') as file:
            file.write(b'not a database at all, but long enough' * 100)
        error = self.assertRaises(
            exception.AcceleratorsUnavailable, claims.ClaimStore,
            self.path + '.bad')
        self.assertIn(self.path + '.bad', str(error))
