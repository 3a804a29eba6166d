# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel fits and defrag, with Placement itself.

Migrations are carried out in tests/functional/test_defrag.py, by Nova.
"""

import json
import logging
import os
import stat

import fixtures
import testtools

from nova_accel.cmd import defrag
from nova_accel.cmd import fits
from nova_accel import conf
from tests.unit import commands
from tests.unit import placement

GPU = 'CUSTOM_ACCELERATOR_GPU'
L40S = 'CUSTOM_GPU_NVIDIA_L40S'


def flavor(name, gpus, **more):
    return {'id': name, 'name': name, 'vcpus': 1, 'ram': 64, 'disk': 0,
            'OS-FLV-EXT-DATA:ephemeral': 0, 'swap': '',
            'extra_specs': {f'resources1:{GPU}': str(gpus), **more}}


class CloudTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)
        self.addCleanup(conf.CONF.reset)
        self.services = self.useFixture(placement.Services())
        self.pools, self.nodes = {}, []
        self.there = {name: [] for name in ('compute1', 'compute2')}
        for name in self.there:
            root = self.services.provider(
                name, inventory={'VCPU': 8, 'MEMORY_MB': 4096})
            self.pools[name] = self.services.provider(
                f'{name}_accel_pool_GPU', root, {GPU: 4}, [L40S])
            self.nodes.append({
                'id': root, 'hypervisor_hostname': name, 'state': 'up',
                'status': 'enabled',
                'service': {'host': f'{name}.example',
                            'disabled_reason': None}})
        # without accelerators
        self.services.provider('compute3', inventory={'VCPU': 8})
        self.services.answer('/os-hypervisors/detail', {
            'hypervisors': self.nodes})
        for node in self.nodes:
            self.services.answer(f'/os-hypervisors/{node["id"]}', {
                'hypervisor': node})
        self.flavors = [flavor('one', 1), flavor('four', 4), {
            **flavor('plain', 0), 'extra_specs': {}}]
        # in two pages
        self.services.answer('/flavors/detail?is_public=None&marker=one', {
            'flavors': self.flavors[1:]})
        self.services.answer('/flavors/detail', {
            'flavors': self.flavors[:1], 'flavors_links': [
                {'rel': 'next', 'href': 'http://next/'}]})
        for one in self.flavors:
            self.services.answer(f'/flavors/{one["name"]}', {'flavor': one})

    def run_command(self, name, *arguments):
        command = {'fits': fits.Fits, 'defrag': defrag.Defrag,
                   'profile describe': fits.DescribeFlavors}[name]
        done = commands.run(
            *name.split(), *arguments, '--config-file', '/dev/null',
            '-f', 'json', **{name: command})
        self.assertNotIn('Traceback', done.stderr)
        return done

    def rows(self, *arguments):
        done = self.run_command(*arguments)
        self.assertEqual(0, done.returncode, done.stderr)
        return [tuple(row.values()) for row in json.loads(done.stdout)]

    def server(self, uuid, host, gpus=1, **more):
        self.services.allocate(uuid, self.pools[host], **{GPU: gpus})
        self.there[host].append({
            **placement.SERVER, 'id': uuid, 'name': f'server-{uuid[:1]}',
            'OS-EXT-SRV-ATTR:hypervisor_hostname': host,
            'flavor': {**placement.SERVER['flavor'], 'extra_specs': {
                f'resources1:{GPU}': str(gpus)}}, **more})
        for name, servers in self.there.items():
            path = f'/servers/detail?all_tenants=1&limit=1000&host={name}' \
                   f'.example'
            self.services.answer(path, {'servers': servers})


GROUP = '9e9fa2d9-0000-4000-8000-000000000001'
A, B = (f'{n}' * 8 + '-1111-4222-8333-444444444444' for n in 'ab')


class FitsTest(CloudTestCase):

    def test_all_flavors(self):
        self.services.allocate(A, self.pools['compute1'], **{GPU: 1})
        self.assertEqual([
            ('one', '(all)', 7, f'{GPU} (on 2 of 2 hosts)'),
            ('four', '(all)', 1, f'{GPU} (on 2 of 2 hosts)'),
        ], self.rows('fits'))

    def test_list_without_end(self):
        """Nova gives one page again and again."""
        self.services.answer('/flavors/detail?is_public=None&marker=one', {
            'flavors': self.flavors[:1], 'flavors_links': [
                {'rel': 'next', 'href': 'http://next/'}]})
        done = self.run_command('fits')
        self.assertEqual(1, done.returncode)
        self.assertIn('the list has no end', done.stderr)

    def test_by_host(self):
        self.services.allocate(A, self.pools['compute1'], **{GPU: 1})
        self.nodes[1]['state'] = 'down'
        down = ('its nova-compute is down: see that it runs and reaches the '
                'message bus, and that the clocks of the hosts agree')
        self.assertEqual([
            ('four', '(all)', 0, f'{GPU} (on 1 of 2 hosts)'),
            ('four', 'compute1', 0, f'4 {GPU} for each, 3 free of 4'),
            ('four', 'compute2', 0, down),
        ], self.rows('fits', 'four', '--by-host'))
        self.assertEqual([
            ('one', '(all)', 3, f'{GPU} (on 1 of 1 hosts)'),
            ('one', 'compute1', 3, f'1 {GPU} for each, 3 free of 4'),
        ], self.rows('fits', 'one', '--host', 'compute1', '--by-host'))

    def test_near(self):
        for name, rack, gpus in (('compute4', 'A', 8), ('compute5', 'B', 4),
                                 ('compute6', 'A', 2)):
            root = self.services.provider(
                name, inventory={'VCPU': 64, 'MEMORY_MB': 65536},
                traits=[f'CUSTOM_NEAR_RACK_{rack}'])
            self.services.provider(f'{name}_accel_pool_GPU', root, {GPU: gpus})
            self.nodes.append({
                'id': root, 'hypervisor_hostname': name, 'state': 'up',
                'status': 'enabled', 'service': {
                    'host': f'{name}.example', 'disabled_reason': None}})
        self.assertEqual([
            ('four', '(all)', 2, 'the most in one rack'),
            ('four', 'CUSTOM_NEAR_RACK_A', 2, f'{GPU} (on 2 of 2 hosts)'),
            ('four', 'CUSTOM_NEAR_RACK_B', 1, f'{GPU} (on 1 of 1 hosts)'),
        ], self.rows('fits', 'four', '--near', 'rack'))
        self.flavors[1]['extra_specs']['accel:near'] = (
            'rail=preferred,rack=required')
        lacks = ('accel:near requires a rack, and the host does not report '
                 'exactly one ([accel] near)')
        self.assertEqual([
            ('four', '(all)', 3, f'{GPU} (on 3 of 5 hosts); accel:near '
             'prefers the level rail, and no suitable host reports a domain '
             'of it'),
            ('four', 'compute1', 0, lacks),
        ], self.rows('fits', 'four', '--by-host')[:2])
        # no job is in two NVLink domains of a rack
        for number, node in enumerate(self.nodes[2:]):
            self.services.set_traits(node['id'], [
                'CUSTOM_NEAR_RACK_A', f'CUSTOM_NEAR_NVLINK_{number}'], 2)
        self.flavors[1]['extra_specs']['accel:near'] = 'nvlink=required'
        self.assertEqual(
            ('four', 'CUSTOM_NEAR_RACK_A', 2),
            self.rows('fits', 'four', '--near', 'rack')[1][:3])
        done = self.run_command('fits', '--near', 'rail')
        self.assertEqual(1, done.returncode)
        self.assertIn("No host reports a domain of the level 'rail'",
                      done.stderr)
        self.assertIn('one of the levels nvlink, rack.', done.stderr)

    def test_places_that_placement_does_not_show(self):
        """A pool on several nodes; one device is on one node anyway."""
        for gpus, hides in (4, True), (1, False):
            self.services.answer('/flavors/four', {'flavor': flavor(
                'four', gpus, **{'accel:same': 'numa'})})
            for row in self.rows('fits', 'four', '--by-host'):
                self.assertEqual(
                    hides, 'fewer if they are not on one NUMA node, which '
                    'Placement shows with [accel] pools = numa_node'
                    in row[3], row)

    def test_flavor_that_nova_api_refuses(self):
        self.flavors[0]['extra_specs'] = {f'resources1:{GPU}': 'many'}
        [(name, host, number, limit)] = self.rows('fits', 'one')
        self.assertEqual(('one', '(all)', 0), (name, host, number))
        self.assertIn('nova-api refuses the flavor: resources1', limit)

    def test_bad_input(self):
        for arguments, text in (
                (('nope',), 'Nova has no flavor with the name or id \'nope\''),
                (('plain',), 'The flavor plain asks for no accelerator'),
                (('one', '--host', 'nope'), 'has none with this name')):
            with self.subTest(arguments):
                done = self.run_command('fits', *arguments)
                self.assertEqual((1, ''), (done.returncode, done.stdout))
                self.assertIn(text, done.stderr)
                self.assertEqual(1, len(done.stderr.splitlines()))


class PublicTest(CloudTestCase):
    """What tenants read."""

    def setUp(self):
        super().setUp()
        self.file = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'free.json')
        for one in self.flavors:
            one['os-flavor-access:is_public'] = True
        self.services.answer('/flavors/one/os-extra_specs', {})
        self.services.allocate(A, self.pools['compute1'], **{GPU: 1})

    def publish(self, *arguments):
        done = self.run_command('fits', '--public', self.file, *arguments)
        self.assertEqual((0, []), (done.returncode, json.loads(done.stdout)),
                         done.stderr)
        with open(self.file) as file:
            return {flavor['name']: flavor['servers']
                    for flavor in json.load(file)['flavors']}

    def test_words(self):
        self.assertEqual({'one': 'many', 'four': 'few'}, self.publish())
        self.assertEqual({'one': 'few', 'four': 'few'},
                         self.publish('--few', '7'))
        self.assertEqual({'one': '7', 'four': '1'}, self.publish('--numbers'))
        self.services.allocate(B, self.pools['compute2'], **{GPU: 1})
        self.assertEqual({'one': 'many', 'four': 'none'}, self.publish())
        self.assertEqual({'four': 'none'}, self.publish('four'))
        self.assertEqual([], self.services.written)

    def test_sentence(self):
        done = commands.run(
            'fits', '--public', self.file, '--config-file', '/dev/null',
            fits=fits.Fits)
        self.assertEqual(f'{self.file}: 2 flavors.\n', done.stdout)

    def test_nothing_of_others(self):
        """No host, project, server, provider or flavor that is not public."""
        self.flavors[1]['os-flavor-access:is_public'] = False
        self.flavors[2]['extra_specs'] = {f'resources1:{GPU}': '1'}
        self.flavors[2]['OS-FLV-DISABLED:disabled'] = True
        self.services.answer('/flavors/detail?is_public=None&marker=one', {
            'flavors': self.flavors[1:]})
        self.publish()
        with open(self.file) as file:
            found = json.load(file)
        self.assertEqual({'time', 'flavors'}, found.keys())
        self.assertEqual([{'id': 'one', 'name': 'one', 'servers': 'many'}],
                         found['flavors'])

    def test_replaced_in_one_step(self):
        """Every user reads it; without an answer the one before stays."""
        self.addCleanup(os.umask, os.umask(0o077))
        self.publish()
        before = os.stat(self.file)
        self.assertEqual(0o644, stat.S_IMODE(before.st_mode))
        reader = open(self.file)
        self.addCleanup(reader.close)
        self.publish('--numbers')
        self.assertNotEqual(before.st_ino, os.stat(self.file).st_ino)
        self.assertIn('many', reader.read())
        self.assertEqual(['free.json'],
                         os.listdir(os.path.dirname(self.file)))
        self.services.answer('/os-hypervisors/detail', None)
        done = self.run_command('fits', '--public', self.file)
        self.assertEqual(1, done.returncode)
        with open(self.file) as file:
            self.assertIn('"7"', file.read())

    def test_property_on_change_only(self):
        self.flavors[1]['extra_specs']['accel:available'] = 'few'
        self.services.answer('/flavors/detail?is_public=None&marker=one', {
            'flavors': self.flavors[1:]})
        self.publish('--property')
        self.assertEqual([('POST', '/flavors/one/os-extra_specs', {
            'extra_specs': {'accel:available': 'many'}})],
            self.services.written)
        # the property asks for nothing
        self.flavors[0]['extra_specs']['accel:available'] = 'many'
        self.services.answer('/flavors/detail', {'flavors': self.flavors})
        self.publish('--property')
        self.assertEqual(1, len(self.services.written))

    def test_refused(self):
        for arguments, why in (
                (('--property',), 'is not given: name a file'),
                (('--public', '/proc/none/x'), 'cannot be written to')):
            done = self.run_command('fits', *arguments)
            self.assertEqual(1, done.returncode)
            self.assertIn(why, done.stderr)
        self.services.answer('/flavors/one', None)
        done = self.run_command('fits', '--public', self.file, '--property')
        self.assertEqual(1, done.returncode)
        self.assertIn('a change of the flavor one, and it refused',
                      done.stderr)


class DescribeTest(CloudTestCase):
    """What Horizon and Skyline show of a flavor."""

    def setUp(self):
        super().setUp()
        self.flavors[0]['extra_specs'][f'trait1:{L40S}'] = 'required'
        for path in '/flavors/one/os-extra_specs', '/flavors/four/os-extra':
            self.services.answer(path, {})
        self.services.answer('/flavors/one', {'flavor': self.flavors[0]})

    def described(self, *arguments):
        return self.rows('profile describe', *arguments)

    def test_written(self):
        gpu = 'compute_optimized_type_with_gpu'
        self.assertEqual([
            ('one', '1 GPU NVIDIA L40S', gpu, 'written'),
            ('four', '4 GPU', gpu, 'written')], self.described())
        specs = {':architecture': 'heterogeneous_computing', ':category': gpu}
        self.assertEqual([
            ('POST', '/flavors/one/os-extra_specs', {'extra_specs': specs}),
            ('PUT', '/flavors/one',
             {'flavor': {'description': '1 GPU NVIDIA L40S'}})],
            self.services.written[:2])
        self.flavors[0].update(description='1 GPU NVIDIA L40S')
        self.flavors[0]['extra_specs'].update(specs)
        del self.services.written[:]
        self.assertEqual([('one', '1 GPU NVIDIA L40S', gpu, 'was so')],
                         self.described('one'))
        self.assertEqual([], self.services.written)

    def test_what_is_there_stays(self):
        self.flavors[0].update(description='Fast')
        self.flavors[0]['extra_specs'][':category'] = 'other'
        self.assertEqual([('one', 'Fast', 'other', 'written')],
                         self.described('one'))
        self.assertEqual([{':architecture': 'heterogeneous_computing'}], [
            body['extra_specs'] for _, _, body in self.services.written])
        self.assertEqual('1 GPU NVIDIA L40S',
                         self.described('one', '--replace')[0][1])

    def test_dry_run(self):
        self.assertEqual('planned', self.described('one', '--dry-run')[0][3])
        self.flavors[0]['extra_specs']['accel:near'] = (
            'nvlink=required,rack=preferred')
        self.assertEqual(
            '1 GPU NVIDIA L40S; servers near each other: nvlink required, '
            'rack preferred',
            self.described('one', '--replace', '--dry-run')[0][1])
        self.assertEqual([], self.services.written)

    def test_categories(self):
        for specs, description, category in (
                ({'resources:CUSTOM_ACCELERATOR_VGPU': '1',
                  'trait:CUSTOM_VGPU_NVIDIA_A40_2Q':
                  'required'}, '1 VGPU NVIDIA A40 2Q',
                 'visualization_compute_optimized_type_with_gpu'),
                ({'resources:CUSTOM_ACCELERATOR_FPGA': '2',
                  'accel:function_name': 'nlb'}, '2 FPGA with nlb',
                 'compute_optimized_type')):
            self.flavors[0]['extra_specs'] = specs
            self.services.answer('/flavors/one', {'flavor': self.flavors[0]})
            self.assertEqual((description, category),
                             self.described('one', '--dry-run')[0][1:3])

    def test_flavor_that_nova_api_refuses(self):
        self.flavors[0]['extra_specs'] = {f'resources1:{GPU}': 'many'}
        self.services.answer('/flavors/one', {'flavor': self.flavors[0]})
        self.assertIn('nova-api refuses it: ', self.described('one')[0][3])
        self.assertEqual([], self.services.written)


class DefragTest(CloudTestCase):

    def setUp(self):
        super().setUp()
        self.server(A, 'compute1')
        self.server(B, 'compute2')

    def test_plan(self):
        done = self.run_command('defrag', '--for', 'four')
        self.assertEqual(0, done.returncode)
        [row] = json.loads(done.stdout)
        self.assertEqual((1, 'server-a', A, 'compute1', 'compute2', 'planned'),
                         tuple(row.values()))
        self.assertIn(
            '0 of four fit now; after 1 migration 1 fits. To carry them out: '
            'nova-accel defrag --for four -n 1 --do ', done.stderr)

    def test_nothing_to_do(self):
        done = self.run_command('defrag', '--for', 'one', '-n', '2')
        self.assertEqual((0, []), (done.returncode, json.loads(done.stdout)))
        self.assertIn('6 of one fit now, and nothing has to move for 2.',
                      done.stderr)

    def test_no_room(self):
        done = self.run_command('defrag', '--for', 'four', '-n', '2')
        self.assertEqual((1, []), (done.returncode, json.loads(done.stdout)))
        self.assertIn('No migrations were found after which 2 of four fit',
                      done.stderr)

    def test_servers_that_stay(self):
        for change in ({'status': 'RESCUE'}, {'locked': True},
                       {'OS-EXT-STS:task_state': 'rebooting'}):
            for servers in self.there.values():
                servers[0].update(status='ACTIVE', locked=False, **{
                    'OS-EXT-STS:task_state': None})
            self.there['compute1'][0].update(change)
            done = self.run_command('defrag', '--for', 'four')
            [row] = json.loads(done.stdout)
            self.assertEqual(B, row['Server ID'])

    def test_near(self):
        """Room in one rack, and a server group that is brought into one."""
        group = f'/os-server-groups/{GROUP}'
        self.services.answer(group, {'server_group': {
            'members': [A, B], 'policies': ['anti-affinity']}})
        for arguments, text in (
                (('--for', 'four', '--near', 'rack'),
                 "No host reports a domain of the level 'rack'"),
                (('--group', GROUP), 'without --near: name the level'),
                (('--group', A, '--near', 'rack'),
                 f'Nova has no server group with the id {A!r}')):
            done = self.run_command('defrag', *arguments)
            self.assertEqual((1, ''), (done.returncode, done.stdout))
            self.assertIn(text, done.stderr)
            self.assertEqual(1, len(done.stderr.splitlines()))
        for node, rack in zip(self.nodes, 'AB'):
            self.services.set_traits(node['id'], [f'CUSTOM_NEAR_RACK_{rack}'])
        done = self.run_command('defrag', '--for', 'four', '--near', 'rack')
        self.assertEqual([(A, 'compute2')], [
            (row['Server ID'], row['To']) for row in json.loads(done.stdout)])
        self.assertIn(
            '0 of four fit in one rack now; after 1 migration 1 fits in one '
            'rack. To carry them out: nova-accel defrag --for four -n 1 '
            '--near rack --do ', done.stderr)
        # one on each host, and no other host
        done = self.run_command('defrag', '--group', GROUP, '--near', 'rack')
        self.assertEqual((1, []), (done.returncode, json.loads(done.stdout)))
        self.assertIn(
            'No migrations were found after which 2 of the members are in '
            'one rack: see nova-accel fits --near rack --by-host.', done.stderr)
        self.services.answer(group, {'server_group': {
            'members': [A, B], 'policies': ['soft-anti-affinity']}})
        done = self.run_command('defrag', '--group', GROUP, '--near', 'rack')
        self.assertEqual([(A, 'compute2')], [
            (row['Server ID'], row['To']) for row in json.loads(done.stdout)])
        self.assertIn(
            '1 of the members is in one rack now; after 1 migration 2 are in '
            f'one rack. To carry them out: nova-accel defrag --group {GROUP} '
            '--near rack --do ', done.stderr)
        self.there['compute1'][0]['locked'] = True
        done = self.run_command('defrag', '--group', GROUP, '--near', 'rack')
        self.assertEqual((1, ''), (done.returncode, done.stdout))
        self.assertIn(f'members that cannot be migrated now ({A})',
                      done.stderr)

    def test_plan_that_changed(self):
        done = self.run_command('defrag', '--for', 'four')
        plan = done.stderr.split()[-1]
        self.there['compute1'][0]['locked'] = True
        done = self.run_command('defrag', '--for', 'four', '--do', plan)
        self.assertEqual((1, ''), (done.returncode, done.stdout))
        self.assertEqual(
            f'Plan {plan} was not carried out, because the present plan is '
            f'another one: nothing was moved; give the command without --do, '
            f'and read the plan again.\n', done.stderr)
        self.assertEqual([], [path for _, path in self.services.asked
                              if path.endswith('/action')])

    def test_bad_input(self):
        for arguments, text in (
                (('--for', 'nope'), 'no flavor with the name or id \'nope\''),
                (('--for', 'plain'), 'asks for no accelerator'),
                (('--for', 'one', '-n', '0'), '-n 0 was given')):
            done = self.run_command('defrag', *arguments)
            self.assertEqual((1, ''), (done.returncode, done.stdout))
            self.assertIn(text, done.stderr)
            self.assertEqual(1, len(done.stderr.splitlines()))
