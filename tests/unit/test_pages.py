# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the pages tell their readers to type exists, and works.

Each command of nova-accel is parsed as nova-accel parses it, and run on a
simulated host where it needs no cloud. Each option of nova.conf, each extra
spec and each device profile is read by the code that reads it in a cloud.
"""

import configparser
import os
import re
import shutil
import uuid
from xml.etree import ElementTree

import ddt
import fixtures
from nova.conf import devices
from nova.conf import opts as nova_options
from oslo_config import cfg
from oslo_messaging import opts as messaging_options
from oslo_privsep import priv_context
from placement import conf as placement_options
import testtools
import yaml

from nova_accel.api import extra_specs
from nova_accel.bitstream import glance
from nova_accel.cmd import main
from nova_accel.cmd import output
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import options
from nova_accel import inventory
from nova_accel import model
from nova_accel import naming
from nova_accel import privsep
from nova_accel import profiles
from nova_accel import request
from nova_accel import sim
from nova_accel.store import claim_store
from nova_accel.store import keys
from nova_accel.store import values
from tests.unit import commands
from tests.unit import configured
from tests.unit import pages
from tests.unit.claims import claim, DEVICE, handle

#: commands that a console block may have and that are not run here, and what
#: they need
NOT_RUN = {
    ('check',): 'privileged processes',
    ('clean',): 'nova-compute',
    ('defrag',): 'a cloud',
    ('drill',): 'nova-compute',
    ('fits',): 'a cloud',
    ('page',): 'a cloud',
    ('program',): 'nova-compute',
    ('prove',): 'privileged processes',
    ('providers', 'purge'): 'a cloud',
    ('release',): 'nova-compute',
    ('tree',): 'a cloud',
    ('why',): 'a cloud',
}
SVG = '{http://www.w3.org/2000/svg}'
#: drivers that only a page has
NOT_INSTALLED = {'acme'}
#: exit statuses other than 0 of commands that did what they were told
STATUS = {'drain': (0, 3), **dict.fromkeys(
    ('claims', 'discover', 'handovers', 'history'), (0, output.NOTHING))}

#: what a user or nova_accel writes beside extra specs of flavors
IMAGE_KEYS = {glance.FUNCTION_ID, glance.FUNCTION_NAME, glance.REGION_TYPE_ID,
              glance.CLEARS, request.SNAPSHOT_PROPERTY, 'accel:bitstream_id'}
METADATA_KEYS = {'accel:bitstream_id', 'accel:status', 'accel:function',
                 'accel:health', 'accel:maintenance',
                 'accel:report', 'accel:report_status', 'accel:healing',
                 'accel:handover'}

#: devices of each kind that the pages have flavors for, in great numbers
HOST = """
iommu: true
cards:
- {address: "0000:5e:00.0", product: PAC_ARRIA10, vfs: 1}
- {address: "0000:81:00.0", product: PAC_D5005, ports: 2, vfs: 2}
alveos:
- {address: "0000:65:00.0", product: U250}
vgpus:
- {address: "0000:41:00.0", device: "2235", units: 48, types: [
    {id: nvidia-558, name: NVIDIA A40-2Q, units: 2}]}
- {address: "0000:42:00.0", device: "26b9", units: 48, types: [
    {id: nvidia-1150, name: NVIDIA L40S-4Q, units: 4}]}
nvmes:
- {address: "0000:02:00.0", vendor: "144d", device: a824}
qats:
- {address: "0000:6b:00.0", product: 4XXX, services: sym;asym, vfs: 16}
timecards:
- {address: "0000:06:00.0", source: PPS, gnss: SYNC, offset: -42}
"""
GPUS = [f'0000:{bus:x}:00.0' for bus in range(0x90, 0x98)]
SET = [f'0000:{bus:x}:00.0' for bus in range(0xa0, 0xa4)]


@ddt.ddt
class CommandsTest(commands.CommandTestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.main.NovaAccel', pages.App))
        self.useFixture(fixtures.MonkeyPatch(
            'importlib.metadata.entry_points', commands.entry_points_once))

    @ddt.data(*pages.pages())
    def test_parsed(self, page):
        """Also what stands in a sentence, as far as it is given there."""
        manager = main.NovaAccel().command_manager
        for text in page.literals:
            for words in pages.commands(text, 'nova-accel'):
                self.parser(manager, words[1:])
        for block in page.blocks:
            for words in pages.commands(block, 'nova-accel'):
                self.assertEqual('', pages.refused(
                    *self.parser(manager, words[1:])), words)

    def parser(self, manager, words):
        """(parser of the command, its arguments)"""
        try:
            command, name, rest = manager.find_command(words)
        except ValueError as error:
            self.fail(f'nova-accel {" ".join(words)}: {error}')
        parser = command(main.NovaAccel(), None).get_parser(name)
        self.assertEqual([], pages.unknown(parser, rest), words)
        return parser, rest

    @ddt.data(*[page for page in pages.pages() if any(
        pages.commands(block, 'nova-accel') for block in page.blocks)])
    def test_run(self, page):
        self.workspace()
        for block in page.blocks:
            for words in pages.commands(block, 'nova-accel'):
                if (words[1] in ('help', 'complete')
                        or NOT_INSTALLED & set(words)
                        or any(tuple(words[1:len(name) + 1]) == name
                               for name in NOT_RUN)):
                    continue
                what = f'{page}: {" ".join(words)}'
                result = self.main(*words[1:])
                self.assertIn(result.returncode, STATUS.get(words[1], (0,)),
                              f'{what}: {result.stderr}{result.stdout}')
                shown, real = map(_columns, (_output(block, words),
                                             result.stdout))
                if shown:
                    self.assertEqual(real, shown, what)

    def test_page_says_what_is_not_run(self):
        page = (pages.ROOT / 'docs/source/contributor/testing.rst').read_text()
        told = page.split('These commands are only parsed')[1].split('.\n')[0]
        self.assertEqual({' '.join(name) for name in NOT_RUN}, set(
            re.findall('``([a-z ]+)``', told)))

    def workspace(self):
        """A host, and the files and the server that the pages speak of."""
        # where oslo.config finds the file without an argument
        self.useFixture(fixtures.EnvironmentVariable('HOME', self.directory))
        self.config = os.path.join(self.directory, 'nova.conf')
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.directory)
        host = os.path.join(self.directory, 'host.yaml')
        with open(host, 'w') as file:
            file.write(HOST)
        shutil.copytree(pages.ROOT / 'etc/nova_accel/device_profiles',
                        os.path.join(self.directory, 'profiles'))
        self.configure(
            simulated_host=host, enabled_drivers='dfl',
            device_profiles=os.path.join(self.directory, 'profiles'))
        with open('new.yaml', 'w') as file:
            yaml.safe_dump(PROFILE, file)
        for name in 'compute1.json', 'compute2.json':
            with open(name, 'w') as file:
                file.write('[]')
        with open('cyborg.json', 'w') as file:
            yaml.safe_dump({'device_profiles': [PROFILE]}, file)
        store = claim_store.ClaimStore(os.path.join(
            self.directory, 'accel_claims_compute1.sqlite'))
        keys.create(store.path + keys.SUFFIX)
        store.settle(done=[values.EVERYTHING])
        store.set_devices({DEVICE.address: DEVICE})
        store.add([claim('7d9fe0c3-1f3a-4a2b-9d0e-3a1f5c6b7d8e', handle(0),
                         state=model.ClaimState.BOUND)])


PROFILE = {'name': 'new', 'groups': [
    {'resources:CUSTOM_ACCELERATOR_FPGA': '1'}]}


@ddt.ddt
class MakeTest(testtools.TestCase):

    @ddt.data(*pages.pages())
    def test_targets(self, page):
        known = set(re.findall(
            r'^([\w-]+):', (pages.ROOT / 'Makefile').read_text(),
            re.MULTILINE))
        named = {found for text in [*page.blocks, *page.literals]
                 for found in re.findall(r'^make ([a-z][\w-]+)', text,
                                         re.MULTILINE)}
        self.assertEqual(set(), named - known)

    @ddt.data(('demo', '__main__'), ('demo-gpus', 'gpus'))
    @ddt.unpack
    def test_demo(self, picture, module):
        """The pictures of README have the titles that the demo prints;
        tests/ci.py compares all of them."""
        drawn = ElementTree.parse(pages.ROOT / f'docs/source/{picture}.svg')
        story = (pages.ROOT / f'tests/demo/{module}.py').read_text()
        # long texts of the program are in several literals
        story = re.sub(r"'\s+'", '', story)
        titles = [text.text for text in drawn.iter(f'{SVG}text')
                  if text.get('class') in ('caption', 'more')]
        self.assertEqual(8, len(titles))
        for title in filter(None, titles):
            self.assertIn(title, story)

    def test_tables(self):
        """Text between two columns is an error of `make docs` alone."""
        for page in pages.pages():
            border = None
            for number, line in enumerate(page.path.read_text().splitlines()):
                if re.fullmatch(r'=+( +=+)+', line):
                    border = line
                    continue
                if not line.strip() or border is None:
                    # a table ends with its border and an empty line
                    border = border if line.strip() else None
                    continue
                for gap in re.finditer(' +', border):
                    self.assertEqual('', line[gap.start():gap.end()].strip(),
                                     f'{page.path}:{number + 1}')

    def test_for_whom(self):
        """The first paragraph says it; those of the start page, of README and
        of CONTRIBUTING, which others also show, do not."""
        for page in pages.pages():
            name = page.path.relative_to(pages.ROOT)
            if name.parts[:2] == ('docs', 'source') and not re.search(
                    'include::|release-notes::', page.text) and (
                        name.stem not in ('index', 'nova-tests')):
                self.assertRegex(
                    page.text.partition('\n\n.. list-table')[0],
                    r'\n(These pages are|This page (is|leads)) ', str(name))

    def test_no_block_is_cut(self):
        """At 1,280 pixels a page shows 100 columns: _static/phone.css."""
        self.assertEqual([], [
            f'{page}: {line}' for page in pages.pages()
            for block in page.blocks for line in block.splitlines()
            if len(line) > 100])

    def test_paths(self):
        """A file of this repository that a page names is there."""
        for page in pages.pages():
            for text in page.literals:
                if re.fullmatch(r'(tests|nova_accel|docs)/[\w./-]+', text):
                    self.assertTrue((pages.ROOT / text).exists(),
                                    f'{page.path.name} names {text}')


class DescriptionTest(testtools.TestCase):

    def test_leads_nowhere(self):
        """An index has no files of this repository."""
        setup = configparser.ConfigParser()
        setup.read(pages.ROOT / 'setup.cfg')
        named = setup['metadata']['long_description']
        self.assertEqual(
            f'file: {pages.DESCRIPTION.relative_to(pages.ROOT)}', named)
        self.assertNotRegex(pages.DESCRIPTION.read_text(),
                            r'`_|\.\. [a-z]+::|:[a-z]+:`')


def _output(block, words):
    """What the block shows below a command, which ends at the next one."""
    after = block.partition(' '.join(words[:2]))[2]
    return re.split(r'^\$ ', after, flags=re.MULTILINE)[0]


def _columns(text):
    found = re.search(r'^\|(.*)\|$', text, re.MULTILINE)
    return [cell.strip() for cell in found[1].split('|')] if found else None


@ddt.ddt
class OptionsTest(testtools.TestCase):

    def test_named(self):
        known = {(group or 'DEFAULT', name)
                 for found in (nova_options.list_opts(), conf.list_opts(),
                               messaging_options.list_opts())
                 for group, listed in found for option in listed
                 for name in (option.name, option.dest)
                 for group in [getattr(group, 'name', group)]}
        nova = cfg.ConfigOpts()
        devices.register_opts(nova)
        nova.set_override('enabled_mdev_types', ['nvidia-558'], 'devices')
        devices.register_dynamic_opts(nova)
        known |= {('mdev_nvidia-558', name) for name in nova['mdev_nvidia-558']}
        # those of Placement need a configuration of their own
        placement = cfg.ConfigOpts()
        placement_options.register_opts(placement)
        known |= {(group, name) for group, found in placement._groups.items()
                  for name in found._opts}
        known |= {(context.cfg_section, option.dest)
                  for context in (privsep.ctx, privsep.disks,
                                  privsep.processes)
                  for option in priv_context.OPTS}
        # of CloudKitty, which is not in the test packages
        known |= {('collect', name)
                  for name in ('collector', 'period', 'scope_key')}
        # of Nova 33 and 34; the installed Nova may be an earlier one
        known |= {('libvirt', 'live_migration_parallel_connections'),
                  ('DEFAULT', 'concurrency_backend')}
        unknown = {f'{page}: [{section}] {option}'
                   for page in pages.pages()
                   for section, option in page.options() - known}
        self.assertEqual(set(), unknown)

    @ddt.data(*[page for page in pages.pages() if page.configurations()])
    def test_values(self, page):
        """Those of [accel] can be read as nova-compute reads them, and
        nova-scheduler finds its filters."""
        path = os.path.join(self.useFixture(fixtures.TempDir()).path, 'f')
        for block in page.configurations():
            with open(path, 'w') as file:
                # a placeholder for what the reader has
                file.write(re.sub('<[^>]+>', '-', block))
            self.addCleanup(conf.CONF.reset)
            conf.CONF(['--config-file', path], project='nova')
            self.assertEqual([], options.malformed(), block)
            self.assertEqual([], conf.unknown(), block)
            scheduler = conf.sections().get('filter_scheduler')
            if scheduler:
                self.assertEqual(set(), pages.not_found(scheduler), block)


@ddt.ddt
class RequestsTest(configured.TestCase):

    @ddt.data(*pages.pages())
    def test_keys(self, page):
        """Each accel: key that a page names is read or written somewhere."""
        known = {*IMAGE_KEYS, *METADATA_KEYS, *request.FLAVOR_KEYS,
                 request.PROFILE_KEY, request.EXPANDED_KEY,
                 request.AVAILABLE_KEY,
                 *(v.name.replace('{group}', '')
                   for v in extra_specs.VALIDATORS)}
        for key in re.findall(r'accel(?:<\w>|[0-9]+|_[A-Z0-9]+)?:[a-z_]+',
                              '\n'.join([*page.literals, *page.blocks])):
            key = re.sub('accel[^:]*', 'accel', key)
            # each driver has its own of these
            self.assertIn(re.sub('driver_.*', 'driver_{key}', key), known)

    @ddt.data(*[page for page in pages.pages()
                if page.profiles() or page.flavors()])
    def test_devices(self, page):
        """Each profile and each flavor can be read, and devices that the
        drivers find satisfy it."""
        directory = self.useFixture(fixtures.TempDir()).path
        with open(os.path.join(directory, 'page.yaml'), 'w') as file:
            yaml.safe_dump(page.profiles(), file)
        shutil.copytree(pages.ROOT / 'etc/nova_accel/device_profiles',
                        os.path.join(directory, 'shipped'))
        files = profiles.load(directory)
        self.assertEqual({}, files.bad)
        found = {p.name: p for listed in (
            *profiles.load(os.path.join(directory, 'shipped')).good.values(),
            *files.good.values()) for p in listed}
        offered = self.offered()
        for specs in [*page.flavors(), *(
                {request.PROFILE_KEY: p['name']} for p in page.profiles())]:
            expanded = profiles.expand(specs, found.__getitem__)
            for wanted in request.parse(expanded):
                self.assertTrue(
                    any(_satisfies(provider, wanted) for provider in offered),
                    f'{specs}: no device has {sorted(wanted.required)} for '
                    f'{wanted}')

    def offered(self):
        """The providers of a host with devices of each kind."""
        path = os.path.join(self.useFixture(fixtures.TempDir()).path, 'host')
        with open(path, 'w') as file:
            yaml.safe_dump({**yaml.safe_load(HOST), 'gpus': [
                {'address': address, 'device_serial': f'{n:016x}'}
                for n, address in enumerate(GPUS + SET)], 'others': [
                    {'address': '0000:c0:00.0', 'vendor': '19e5',
                     'device': 'd801', 'class': '0x120000'}]}, file)
        names = ['dfl', 'xrt', 'gpu', 'vgpu', 'nvme', 'qat', 'timecard', 'pci']
        self.config.config(
            group='accel', include_devices=['address=*'],
            enabled_drivers=names, device_sets=[' '.join(SET)], pci_devices=[
                'vendor=19e5 type=AI name=ASCEND_310 traits=CUSTOM_NPU'])
        found = inventory.Inventory(
            drivers.load(names, sim.SimulatedKernel(path)),
            claim_store.ClaimStore(claim_store.MEMORY), reads_serials=False)
        found.scanner.scan()
        self.assertEqual({}, found.failures())
        return found.shown.providers_of('host', str(uuid.uuid4())).values()


def _satisfies(provider, wanted):
    """Whatever function it carries."""
    return (provider.inventory.get(wanted.resource_class, 0) >= wanted.amount
            and all(map(naming.is_content, wanted.required - provider.traits))
            and all(provider.inventory.get(name, 0) >= mib
                    for name, mib in wanted.memory.items()))
