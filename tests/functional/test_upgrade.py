# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The page on upgrades, played with release 0.1 and this one.

Servers run all the time. Services are upgraded and rolled back in the order of
the page; nova-api, which comes first, is of this release.
"""

import contextlib
import json
import os
import re
import shutil
import sqlite3
import sys
from unittest import mock

from nova.scheduler.client import report
from oslo_config import cfg

from nova_accel.cmd import check
from nova_accel.cmd import discover
from nova_accel import sim
from nova_accel.store import schema
from nova_accel.virt import driver
from tests import earlier
from tests.functional import base
from tests.functional import operations
from tests.unit import commands
from tests.unit import pages
from tests.unit import test_cmd_check

CARD = '0000:5e:00.0'
DISKS = [f'0000:0{n}:00.0' for n in (2, 3, 4, 5)]
SSD, FPGA = 'CUSTOM_ACCELERATOR_SSD', 'CUSTOM_ACCELERATOR_FPGA'
REGION = f'compute1_accel_{CARD}_region0'
#: function of the operator's clearing image
BLANK = '00000000-1111-4222-8333-444444444444'
DISK = {f'resources1:{SSD}': '1'}
TWO_DISKS = {**DISK, f'resources2:{SSD}': '1', 'group_policy': 'isolate'}


class TwoReleases(operations.OperationsTestBase):

    FRESH_CLOUD = True
    HOSTS = {'compute1': {
        'cards': [{'address': CARD, 'product': 'PAC_ARRIA10',
                   'interface': base.SHELL_11, 'functions': [base.NLB0],
                   'ports': 1, 'programming_seconds': 0}],
        'nvmes': [{'address': disk} for disk in DISKS]}}

    def setUp(self):
        if not earlier.is_here():
            self.skipTest('the history of the repository is not here')
        super().setUp()
        self.upload_bitstream(BLANK, properties={
            'accel:clears': 'registers',
            'accel:region_type_id': base.SHELL_11})
        self.disks = self.boot(TWO_DISKS, host='compute1')
        self.fpga = self.boot(base.fpga_flavor())
        self.before = [(server, self.hostdevs(server))
                       for server in (self.disks, self.fpga)]

    def build(self):
        self.old = self.useFixture(earlier.Release())
        #: hosts whose nova-compute is of release 0.1
        self.of_old = set(self.HOSTS)
        super().build()

    def start_compute(self, hostname, *args, **kwargs):
        with self.release(hostname in self.of_old):
            return super().start_compute(hostname, *args, **kwargs)

    def release(self, old):
        return self.old.in_place() if old else contextlib.nullcontext()

    def _setup_scheduler_service(self):
        with self.old.in_place():
            return super()._setup_scheduler_service()

    def _setup_compute_service(self):
        super()._setup_compute_service()
        # what release 0.1 needs for all of them
        self.flags(enabled_drivers=['dfl', 'nvme'], include_devices=[],
                   virtual_functions=[], group='accel')

    def simulated(self, host):
        if host not in self.of_old:
            return super().simulated(host)
        return self.old.sim.SimulatedKernel(self.path(host))

    def path(self, host):
        return os.path.join(self.hosts, f'{host}.yaml')

    # What an operator does

    def stop(self, host, old):
        """Stop nova-compute; the next one is of release 0.1, or of this."""
        self.computes[host].stop()
        if old is not (host in self.of_old):
            earlier.translate(self.path(host), self.old.sim if old else sim)
            self.of_old ^= {host}

    def start(self, host, old=False):
        self.stop(host, old)
        self.restart_compute_service(host)

    def start_killed(self, host, kill):
        """nova-compute of this release is killed while it starts.

        :param kill: context in which it is.
        """
        self.stop(host, old=False)
        known = self.computes[host], self.compute_rp_uuids[host]
        init, died = driver.AccelLibvirtDriver.init_host, []

        def begin(mine, *args, **kwargs):
            died.append(mine)
            return init(mine, *args, **kwargs)
        with kill, mock.patch.object(
                driver.AccelLibvirtDriver, 'init_host', begin):
            self.assertRaises(operations.Killed,
                              self.restart_compute_service, host)
        self.computes[host], self.compute_rp_uuids[host] = known
        with contextlib.suppress(AttributeError):
            # its threads end with a process; the store may not be open
            died[0].accelerators.close()

    def restart_scheduler(self, old):
        self.scheduler.stop()
        with self.release(old):
            self.scheduler = self.start_service('scheduler')

    def store(self, host):
        return os.path.join(cfg.CONF.state_path,
                            f'accel_claims_{host}.sqlite')

    def version(self, host):
        with contextlib.closing(sqlite3.connect(self.store(host))) as db:
            return db.execute('PRAGMA user_version').fetchone()[0]

    def back_up(self, host):
        with (contextlib.closing(sqlite3.connect(self.store(host))) as db,
              contextlib.closing(sqlite3.connect(
                  f'{self.store(host)}.copy')) as copy):
            db.backup(copy)

    def restore(self, host):
        for suffix in '-wal', '-shm':
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.store(host) + suffix)
        os.unlink(self.store(host))
        shutil.copy(f'{self.store(host)}.copy', self.store(host))

    @contextlib.contextmanager
    def aside(self, host):
        """The new release is installed aside, on a compute host."""
        copy = f'{self.hosts}.copy'
        shutil.copytree(self.hosts, copy)
        # both releases understand a host that is not simulated
        earlier.translate(os.path.join(copy, f'{host}.yaml'), sim)
        self.flags(simulated_host=copy, group='accel')
        sys.modules['libvirt'] = test_cmd_check.Libvirt()
        with open(self.store(host), 'rb') as file:
            then = file.read()
        try:
            with mock.patch('nova_accel.cmd.configuration.read'), \
                    mock.patch.object(cfg.CONF, 'host', host, create=True):
                yield
        finally:
            del sys.modules['libvirt']
            self.flags(simulated_host=self.hosts, group='accel')
            shutil.rmtree(copy)
        with open(self.store(host), 'rb') as file:
            self.assertEqual(then, file.read())

    def check(self, host):
        with self.aside(host):
            done = commands.run('check', '-f', 'json', '--service',
                                'compute', check=check.Check)
        # the credentials of these tests lead to Glance alone, and flavors
        # cannot be read with them
        return ' '.join(f'{row["Check"]}: {row["Found"]}'
                        for row in json.loads(done.stdout)
                        if row['Result'] != 'ok'
                        and row['Check'] != 'flavors')

    def discover(self, host):
        with self.aside(host):
            return set(commands.run(
                'discover', '--long', '-f', 'value', '-c', 'Provider',
                discover=discover.Discover).stdout.split())

    # What can be seen

    def shown(self, host, kind):
        """(total, reserved, used) of each provider of a host."""
        return sorted(
            (*inventory.get(kind, (0, 0)), used.get(kind, 0))
            for name, (inventory, _, used) in self.provider_tree().items()
            if name.startswith(f'{host}_') and kind in inventory)

    def assertServersAre(self, before):
        for server, devices in before:
            self.assertEqual(devices, self.hostdevs(server))
            self.assertEqual('ACTIVE', self.api.get_server(
                server['id'])['status'])

    def claimed(self, host):
        """As nova-accel claims shows them: {device: server}."""
        return {c.handle.address: c.instance_uuid for c in self.claims(host)}

    def assertQuiet(self):
        """The log says nothing that the operator has to examine."""
        self.compare()
        self.assertEqual([], [
            line for line in self.stdlog.logger.output.splitlines()
            if re.search(r' (WARNING|ERROR|CRITICAL) \[nova_accel\.', line)
            and 'are simulated' not in line
            # of compute2, which would have a nova.conf of its own
            and 'whole_cards' not in line])

    def prepare(self):
        """What comes before the first nova-compute of this release."""
        self.flags(include_devices=['address=*'], whole_cards=[CARD],
                   group='accel')
        self.back_up('compute1')


class UpgradeTest(TwoReleases):

    HOSTS = {**TwoReleases.HOSTS, 'compute2': {
        'nvmes': [{'address': disk} for disk in DISKS]}}

    def test_upgrade(self):
        there = self.boot(DISK, host='compute2')
        self.before.append((there, self.hostdevs(there)))
        self.flags(auth_type=None, group='service_user')
        said = self.check('compute1')
        for option in 'include_devices', 'whole_cards', '[service_user]':
            self.assertIn(option, said)
        self.give_credentials()
        self.prepare()
        said = self.check('compute1')
        for option in 'include_devices', 'whole_cards', '[service_user]':
            self.assertNotIn(option, said)
        providers = self.discover('compute1')

        reshape = report.SchedulerReportClient.post

        def killed(before):
            def post(client, url, *args, **kwargs):
                if url != '/reshaper':
                    return reshape(client, url, *args, **kwargs)
                if not before:
                    reshape(client, url, *args, **kwargs)
                raise operations.Killed
            return mock.patch.object(report.SchedulerReportClient, 'post',
                                     post)
        first, *_ = schema.MIGRATIONS[0]
        self.start_killed('compute1', mock.patch.dict(schema.MIGRATIONS, {
            0: (first, mock.Mock(side_effect=operations.Killed))}))
        self.assertEqual(0, self.version('compute1'))
        for kill in killed(before=True), killed(before=False):
            self.start_killed('compute1', kill)
        self.forget_log()
        self.start('compute1')
        self.assertEqual(schema.VERSION, self.version('compute1'))
        self.assertQuiet()
        self.assertEqual([(4, 0, 2)], [
            found for found in self.shown('compute1', SSD) if found[1] == 0])
        for server, _ in self.before:
            self._reboot_server(server, hard=True)
        self.assertServersAre(self.before)
        self.assertEqual({
            **dict.fromkeys(self.hostdevs(self.disks), self.disks['id']),
            CARD: self.fpga['id']}, self.claimed('compute1'))

        # the scheduler is of release 0.1 still, and so is compute2
        for host in 'compute1', 'compute2':
            server = self.boot(DISK, host=host)
            self.assertEqual(1, len(self.hostdevs(server)))
            self._delete_server(server)
        self.restart_scheduler(old=False)
        self._delete_server(self.boot(DISK, host='compute1'))
        self._delete_server(self.boot(DISK, host='compute2',
                                      expected_state='ERROR'))
        self.assertIn('Host compute2 gets no servers with accelerators',
                      self.stdlog.logger.output)
        self.forget_log()
        self.start('compute2')
        self.assertQuiet()
        self.report()
        self.assertEqual(providers, {
            name for name in self.provider_tree()
            if name.startswith('compute1_')})
        self.assertEqual(
            ([(4, 0, 2)], [(4, 0, 1)]),
            (self.shown('compute1', SSD), self.shown('compute2', SSD)))
        servers = [self.boot(DISK) for _ in range(5)]
        self.assertEqual(8, len({
            (host, device) for host in self.HOSTS
            for device in self.claimed(host)} - {('compute1', CARD)}))
        self.assertServersAre(self.before)
        for server in (*servers, *(server for server, _ in self.before)):
            self._delete_server(server)
        self.assertEqual([], self.claims())


class RollBackTest(TwoReleases):

    def test_roll_back(self):
        """The scheduler, which is rolled back first, is of release 0.1."""
        self.prepare()
        self.start('compute1')

        # without the first step; nothing is given twice
        self.stop('compute1', old=True)
        self.restore('compute1')
        self.restart_compute_service('compute1')
        self.report()
        # release 0.1 believes that it has four
        failed = self.boot({**TWO_DISKS, f'resources3:{SSD}': '1'},
                           host='compute1', expected_state='ERROR')
        self.assertIn('0 of it are free on this host', self.fault(failed))
        self._delete_server(failed)
        self.assertServersAre(self.before)

        self.start('compute1')
        self.report()
        self.assertServersAre(self.before)
        self.assertEqual([(4, 0, 2)], self.shown('compute1', SSD))

        # as the page says, with the copy
        since = self.boot(DISK, host='compute1')
        self.dissolve_pools()
        self._delete_server(since)
        self.stop('compute1', old=True)
        self.restore('compute1')
        self.restart_compute_service('compute1')
        self.assertEqual(0, self.version('compute1'))
        self.assertEveryDiskIsOfUse(self.before)

        # and with the present claims
        self.flags(pools='host', group='accel')
        self.start('compute1')
        self.report()
        self.give_memory_back()
        since = self.boot(DISK, host='compute1')
        before = [*self.before, (since, self.hostdevs(since))]
        self.dissolve_pools()
        self.stop('compute1', old=True)
        with contextlib.closing(
                sqlite3.connect(self.store('compute1'))) as db:
            db.executescript(pages.back_to_release_0_1())
        self.restart_compute_service('compute1')
        self.assertEveryDiskIsOfUse(before)

        self.flags(pools='host', group='accel')
        self.forget_log()
        self.start('compute1')
        self.report()
        self.assertQuiet()
        self.assertServersAre(before)
        self.assertEqual([(4, 0, 3)], self.shown('compute1', SSD))
        self._delete_server(self.fpga)
        self.claims()
        self.report()
        self.assertEqual(base.REGION, self.provider_tree()[REGION][0])

    def dissolve_pools(self):
        """The first step of a roll-back."""
        self.flags(pools='none', group='accel')
        self.start('compute1')
        self.report()
        self.assertNotIn('compute1_accel_pool', ' '.join(
            self.provider_tree()))

    def assertEveryDiskIsOfUse(self, before):
        """Release 0.1 gives each that is free to a server, once."""
        self.report()
        used = sum(len(devices) for _, devices in before) - 1
        self.assertEqual([(1, 0, 0)] * (4 - used) + [(1, 0, 1)] * used,
                         self.shown('compute1', SSD))
        for server in [self.boot(DISK, host='compute1')
                       for _ in range(4 - used)]:
            self.assertEqual(1, len(self.hostdevs(server)))
            self._delete_server(server)
        for server, _ in before:
            self._reboot_server(server, hard=True)
        self.assertServersAre(before)

    def give_memory_back(self):
        self.assertEqual({FPGA: (1, 0), base.MEMORY: (8192, 8192)},
                         self.provider_tree()[REGION][0])
        # openstack resource provider inventory set --amend
        url = (f'/resource_providers/{self.provider(REGION)["uuid"]}'
               f'/inventories/{base.MEMORY}')
        self.placement.put(url, {**self.placement.get(url).body,
                                 'reserved': 0})
        self.report()
        self.assertEqual({FPGA: (1, 0), base.MEMORY: (8192, 0)},
                         self.provider_tree()[REGION][0])
