# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The story in a screenful: python -m tests.demo, or make demo.

Real nova-api, conductor, scheduler and two nova-computes in this process, real
Placement in it as well, a real Glance as a child, two simulated hosts, and
Nova's imitation of libvirt. Each line that claims something has checked it;
the exit status is 0 only when all of it is so.
"""

import contextlib
import errno
import io
import logging
import os
import sys
import time
import unittest
from unittest import mock
import uuid

from nova_accel import naming
from tests.functional import base
from tests.functional import operations

TERMINAL = sys.stdout.isatty()
OUT = sys.stdout
#: seconds that each simulated card takes to be programmed
SECONDS = 1
NAMES = {base.NLB0: 'NLB0', base.NLB3: 'NLB3', base.CRYPTO: 'crypto'}
FUNCTION = '5ad1bba2-6ee2-4b5a-9c2f-1f3a8c4d7e60'


def paint(text, code):
    return f'\033[{code}m{text}\033[0m' if TERMINAL else text


def say(text=''):
    print(text, file=OUT, flush=True)


def head(text):
    say(paint(text, '1;36'))


class Progress:
    """A line that grows a time when the work is done."""

    def __init__(self, text):
        self.text = text

    def __enter__(self):
        if TERMINAL:
            print(f'  {self.text} ...', end='', file=OUT, flush=True)
        self.began = time.monotonic()
        return self

    def __exit__(self, kind, *_):
        self.seconds = time.monotonic() - self.began
        if TERMINAL:
            print('\r\033[K', end='', file=OUT)
        if kind is None:
            say(f'  {self.text}: {self.seconds:.1f} s')


class Story(operations.OperationsTestBase):

    FRESH_CLOUD = True
    HOSTS = {
        'compute1': {'cards': [
            base.card('0000:5e:00.0', [base.NLB0],
                      programming_seconds=SECONDS),
            base.card('0000:af:00.0', [base.NLB0],
                      programming_seconds=SECONDS)]},
        'compute2': {'cards': [
            base.card('0000:5e:00.0', [base.NLB3],
                      programming_seconds=SECONDS)]},
    }

    def setUp(self):
        say(paint('nova_accel', '1') + ': an FPGA function reaches a guest on '
            'real Nova')
        with Progress('nova-api, conductor, scheduler, 2 nova-computes, '
                      'Placement, Glance'):
            super().setUp()

    def runTest(self):
        head('Placement shows the cards of two hosts as nested providers')
        start = self.show_providers()

        head('A device profile, a flavor that names it, a bitstream in Glance')
        self.write_profiles({'name': 'crypto', 'groups': [{
            'resources:CUSTOM_ACCELERATOR_FPGA': 1,
            'trait:CUSTOM_FPGA_INTEL': 'required',
            'accel:function_id': FUNCTION}]})
        flavor = self._create_flavor(
            extra_spec={'accel:device_profile': 'crypto'})
        image = self.upload_bitstream(FUNCTION)
        NAMES[FUNCTION] = 'crypto'
        say(f'  function {FUNCTION} ("crypto"), image {image}')

        head('Server 1: nobody has the function, so a region is programmed')
        before = self.functions()
        server, seconds = self.create(flavor)
        place = self.place(server)
        self.assertNotEqual(FUNCTION, before[place])
        self.assertEqual(FUNCTION, self.functions()[place])
        self.assertGreaterEqual(seconds, SECONDS)
        say(f'  {place}: before {self.label(before[place])}, after '
            f'{paint(self.label(FUNCTION), 32)} '
            f'(the card takes {SECONDS} s)')
        kept = [n for n, f in before.items() if f == base.NLB3]
        self.assertNotIn(place, kept)
        say(f'  spared, because it has the only {self.label(base.NLB3)}: '
            f'{kept[0]}')
        for line in self.hostdev_xml(server):
            say('    ' + line)
        self.delete(server)

        head('Server 2: the same function is there now, nothing is programmed')
        with mock.patch.object(
                type(self.kernel('compute1')), 'program_dfl_port') as program:
            server, _ = self.create(flavor)
        program.assert_not_called()
        self.assertEqual(place, self.place(server))
        say(f'  on {place} again')

        head('Server 3: a given bitstream, by image')
        other = self.upload_bitstream(base.CRYPTO)
        third, _ = self.create(self._create_flavor(
            extra_spec=base.fpga_flavor(bitstream_id=other)))
        place3 = self.place(third)
        self.assertEqual(base.CRYPTO, self.functions()[place3])
        self.assertIn(naming.bitstream_trait(other), self.traits(place3))
        say(f'  {place3} carries image {other}')

        head('Requests that cannot be met say why')
        specs = {**base.fpga_flavor(),
                 'trait1:CUSTOM_FPGA_INTEL_PAC_N3000': 'required'}
        failed = self.boot(specs, expected_state='ERROR')
        say(f'  a card that nobody has: {self.fault(failed)}')
        wrong = self.upload_bitstream(
            str(uuid.uuid4()), interface=base.SHELL_12)
        failed2 = self.boot(base.fpga_flavor(bitstream_id=wrong),
                            expected_state='ERROR')
        self.assertIn(base.SHELL_12, self.fault(failed2))
        say(f'  a bitstream for another shell: {self.fault(failed2)}')

        for gone in (server, third, failed, failed2):
            self.delete(gone)
        self.operations(flavor, other)

        head('All servers are deleted')
        for server in self.api.get_servers(detail=False):
            self.delete(server)
        self.report()
        end = self.show_providers()
        self.assertEqual(start, end)
        self.assertEqual([], self.claims())
        say(paint('  providers, inventories and usage as at the start, no '
                  'accelerator claimed; the functions stay loaded for the '
                  'next server', 32))

    def operations(self, flavor, crypto):
        head('What Nova with Cyborg refuses or breaks: done, or refused in '
             'words')
        self.give_credentials()
        self.failing_bind()
        server, _ = self.create(flavor)
        os.makedirs(os.path.join(self.instances_path, server['id']))
        before, host = self.assertHas(server), self.host_of(server)

        def same():
            self.assertEqual(before, self.assertHas(server))
            self.assertFunction(before, FUNCTION)

        with Progress('suspend, resume: saved without its card, back with it'):
            self._suspend_server(server)
            self.assertEqual([], self.hostdevs(server))
            self._resume_server(server)
            same()
        with Progress('rescue, unrescue: the rescue guest has the card, too'):
            self._rescue_server(server)
            same()
            self._unrescue_server(server)
            same()
        with Progress('rebuild: the same card and function'):
            self._rebuild_server(server, self.glance.guest_image)
            same()
        with Progress('hard reboot, stop, start: the same card and function'):
            self._reboot_server(server, hard=True)
            same()
            self._stop_server(server)
            self._start_server(server)
            same()
        with Progress('reboot of the host after a power cut: the function is '
                      'put back before the guest starts'):
            self.power_cut(host)
            same()
        with Progress('cold migration: programmed on the other host; revert: '
                      'the original card'):
            self._migrate_server(server)
            self.assertNotEqual(host, self.host_of(server))
            self.assertFunction(self.assertHas(server), FUNCTION)
            self._revert_resize(server)
            same()
        with Progress('resize to a flavor with crypto, confirm: programmed, '
                      'the old card is free'):
            self._resize_server(server, self._create_flavor(
                extra_spec=base.fpga_flavor(
                    bitstream_id=crypto, runtime_programming='true')))
            self._confirm_resize(server)
            self.assertFunction(self.assertHas(server), base.CRYPTO)
            self.assertEqual(1, len(self.claims()))
        with Progress('shelve, unshelve: the card is released; one is found '
                      'and programmed anew'):
            self._shelve_server(server)
            self.assertEqual([], self.claims())
            self._unshelve_server(server)
            self.assertFunction(self.assertHas(server), base.CRYPTO)
        with Progress('evacuate: programmed on the other host; the dead one '
                      'frees its card when it returns'):
            self.evacuate(server)
            self.assertFunction(self.assertHas(server), base.CRYPTO)
            self.assertEqual(1, len(self.claims()))
        self.program_at_run_time(server)
        self.refused('live migration', f'/servers/{server["id"]}/action', {
            'os-migrateLive': {'host': None, 'block_migration': 'auto'}})
        # of disks, which there are none of, a live snapshot asks too much
        self.flags(disable_libvirt_livesnapshot=True, group='workarounds')
        snapshot = self.api.post_server_action(
            server['id'], {'createImage': {'name': 'snapshot'}})['image_id']
        self._wait_for_server_parameter(
            server, {'OS-EXT-STS:task_state': None})
        self.refused('boot from its snapshot', '/servers', {
            'server': self._build_server(
                image_uuid=snapshot, flavor_id=flavor, networks='none')})

    def new_function(self, name, **kwargs):
        """A function that no card has yet; and its image."""
        function = str(uuid.uuid4())
        NAMES[function] = name
        return function, self.upload_bitstream(function, **kwargs)

    def failing_bind(self):
        function, _ = self.new_function('gzip')
        kernel = type(self.kernel('compute1'))
        program = kernel.program_dfl_port
        tried = []

        def fails_once(kernel, *args):
            tried.append(os.path.basename(kernel.path)[:-len('.yaml')])
            if len(tried) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return program(kernel, *args)
        with Progress('programming fails on the first host: built on the '
                      'other'), mock.patch.object(
                          kernel, 'program_dfl_port', fails_once):
            server = self.boot(base.fpga_flavor(function_id=function))
            self.assertFunction(self.assertHas(server), function)
            self.assertEqual(2, len(set(tried)))
            self.assertEqual(tried[-1], self.host_of(server))
            self.assertEqual(1, len(self.claims()))
        self.delete(server)

    def evacuate(self, server):
        host = self.host_of(server)
        service = self.computes[host].service_ref.uuid
        self.computes[host].stop()
        self.admin_api.put_service(service, {'forced_down': 'true'})
        self._evacuate_server(server)
        self.assertNotEqual(host, self.host_of(server))
        self._start_server(server)
        self.restart_compute_service(host)
        self.admin_api.put_service(service, {'forced_down': 'false'})

    def program_at_run_time(self, server):
        held = self.assertHas(server)
        function, image = self.new_function('LDPC', properties={})
        with Progress(f'programming at run time: metadata accel:bitstream_id='
                      f'{image}'):
            self.api.post_server_metadata(
                server['id'], {'accel:bitstream_id': image})
            self.computes[self.host_of(server)].driver.runtime.run()
            self.assertEqual(held, self.assertHas(server))
            self.assertFunction(held, function)
        status = self.api.get_server(server['id'])['metadata']['accel:status']
        self.assertEqual(f'programmed {image}', status)
        say(f'    the guest goes on with the same card, accel:status={status}')

    def power_cut(self, host):
        self.flags(resume_guests_state_on_host_boot=True)
        kernel = self.kernel(host)
        self.computes[host].stop()
        connection = self.computes[host].driver._host.get_connection()
        for domain in connection._vms.values():
            domain.destroy()
        kernel.power_cycle()
        self.restart_compute_service(host)

    def refused(self, what, url, body):
        answer = self.api.api_post(url, body, check_response_status=[400])
        say(f'  {what}, refused: '
            f'{answer.body["badRequest"]["message"]}')

    # What a user does

    def create(self, flavor):
        with Progress('ACTIVE after') as progress:
            server = self._create_server(
                flavor_id=flavor, networks='none', expected_state='ACTIVE')
        return server, progress.seconds

    def delete(self, server):
        """Until the region is clean, which the user does not wait for."""
        self.api.delete_server(server['id'])
        self._wait_until_deleted(server)
        self.claims()

    # What a user sees

    def place(self, server):
        """The provider that the server's device is allocated from."""
        allocated = self._get_allocations_by_server_uuid(server['id'])
        uuid_, = (u for u, a in allocated.items()
                  if 'CUSTOM_ACCELERATOR_FPGA' in a['resources'])
        return self.placement.get(
            f'/resource_providers/{uuid_}').body['name']

    def functions(self):
        return {name: self.function_in(traits)
                for name, (_, traits, _) in self.provider_tree().items()
                if '_region' in name}

    @staticmethod
    def function_in(traits):
        found = {naming.function_of(t) for t in traits} - {None}
        return str(uuid.UUID(found.pop())) if found else None

    @staticmethod
    def label(function):
        return f'{NAMES[function]} ({function[:8]})' if function else 'nothing'

    def hostdev_xml(self, server):
        lines = self.guest_xml(server).splitlines()
        begin = next(i for i, x in enumerate(lines) if '<hostdev' in x)
        end = next(i for i, x in enumerate(lines) if '</hostdev' in x)
        return [line.strip() for line in lines[begin:end + 1]
                if line.strip()]

    def show_providers(self):
        """Print the regions; what must be the same again at the end."""
        tree = self.provider_tree()
        for name, (totals, traits, usages) in sorted(tree.items()):
            if '_region' in name:
                total, _ = totals['CUSTOM_ACCELERATOR_FPGA']
                used = usages.get('CUSTOM_ACCELERATOR_FPGA', 0)
                programmable = ('programmable' if naming.PROGRAMMABLE in traits
                                else '')
                function = self.label(self.function_in(traits))
                say(f'  {name}  {used}/{total} used  {function:18} '
                    f'{programmable}')
        return {name: (totals, naming.PROGRAMMABLE in traits, usages)
                for name, (totals, traits, usages) in tree.items()}


def main():
    began = time.monotonic()
    logging.disable(logging.INFO)
    result = unittest.TestResult()
    noise = io.StringIO()
    with contextlib.redirect_stderr(noise):
        Story().run(result)
    good = result.wasSuccessful()
    if not good:
        say(noise.getvalue())
    for _, trace in result.errors + result.failures:
        say(paint(trace, 31))
    say(f'{"Done" if good else "FAILED"} in {time.monotonic() - began:.0f} s')
    return 0 if good else 1


if __name__ == '__main__':
    sys.stdout.flush()
    status = main()
    # threads of a card that hangs must not keep the process
    OUT.flush()
    os._exit(status)
