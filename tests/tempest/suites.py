# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The suites: which tests, with which flavors and options of tempest.conf."""

import configparser
import dataclasses
import pathlib
import sys

import yaml

from tests.tempest import COMPUTES, CONF, HERE, hosts

PERMITTED = HERE / 'permitted.txt'
PART = HERE / 'part.txt'
#: device profiles; live migration takes the device from the guest and gives it
#: another one
FUNCTIONS = {'crypto': '5b3a1c7e-92d4-4f60-8e1b-c07d64a2f935',
             'zip': 'f7df405c-bd7a-cf72-22f1-44b0b93acd18'}
#: extra specs of the flavors
FLAVORS = {
    'plain': {},
    'fpga': {'accel:device_profile': 'crypto'},
    'fpga-zip': {'accel:device_profile': 'zip'},
    'gpu': {'resources1:PGPU': '1'}}
#: a network of all projects, for clients that log in to guests
SHARED = 'shared'
#: clients log in to guests: plugin.py answers in their place
INSIDE = {'validation': {'run_validation': 'true',
                         'network_for_ssh': SHARED},
          'auth': {'create_isolated_networks': 'false'},
          'compute': {'fixed_network_name': SHARED}}


@dataclasses.dataclass(frozen=True)
class Suite:
    #: a regex for the ids of its tests
    tests: str
    #: names of the flavor that servers have, and of the one for resizes
    flavors: tuple[str, str]
    options: dict = dataclasses.field(default_factory=dict)
    #: processes of stestr
    workers: int = 2
    #: the compute host is the lab's machine, whose guests see their devices
    in_lab: bool = False


_CYBORG = r'^cyborg_tempest_plugin\.tests\.scenario'
SUITES = {
    # an FPGA with a function that is programmed; a resize gives a GPU
    'compute': Suite(r'^tempest\.api\.compute', ('fpga', 'gpu')),
    # before 2.30 a named host is forced, which Nova refuses for each server
    # with nested providers
    'live': Suite('LiveAutoBlockMigrationV225Test', ('fpga', 'fpga-zip'), {
        'compute': {'min_microversion': '2.30'},
        'compute-feature-enabled': {
            'block_migration_for_live_migration': 'true'}}),
    # its tests make their own flavors, with a device profile
    'cyborg': Suite(_CYBORG, ('plain', 'plain'), INSIDE),
    # the tests of vGPUs make their own flavors, with VGPU
    'vgpu': Suite(r'^whitebox_tempest_plugin\.api\.compute\.test_vgpu',
                  ('plain', 'plain'), {
                      **INSIDE, 'placement': {'min_microversion': '1.14'}},
                  workers=1),
    # each stops one of two nova-computes
    'evacuation': Suite(r'^whitebox_tempest_plugin\.api\.compute\.'
                        r'test_server_evacuation', ('fpga', 'gpu'),
                        workers=1),
    # everything is interpreted; the card has no VFs, and is given whole
    'lab': Suite(_CYBORG, ('plain', 'plain'), {
        **INSIDE, 'cyborg_pci': {'product_id': '09c4'},
        'compute': {**INSIDE['compute'], 'min_compute_nodes': '1',
                    'build_timeout': '1800'},
        'image': {'build_timeout': '1800'}}, workers=1, in_lab=True)}


def here() -> dict[str, Suite]:
    """Return the suites of the cloud that is up."""
    return {name: suite for name, suite in SUITES.items()
            if suite.in_lab == hosts.is_machine()}


def whitebox_hosts() -> dict:
    """Return how whitebox-tempest-plugin stops and starts nova-compute."""
    command = f'{sys.executable} -m tests.tempest.computes'
    return {host: {'services': {'libvirt': {}, 'nova-compute': {
        'start_command': f'{command} start {host}',
        'stop_command': f'{command} stop {host}'}}} for host in COMPUTES}


def boot_sector() -> bytes:
    """Return a guest that writes lines to its serial console and halts."""
    # begins as a FAT file system does: Glance takes it for raw then
    code = bytearray.fromhex('eb3c90').ljust(0x3e, b'\0')
    code[0x10], code[0x15] = 2, 0xf8
    text = 0x7c00 + 0x3e + 35
    code += bytes.fromhex(
        'fa 31c0 8ed8 fc'   # cli; ds = 0; cld
        f'be {text.to_bytes(2, "little").hex()}'    # si = text
        'ac 84c0 7412'      # next: al = *si++; if not al: jump to halt
        '88c4 bafd03'       # ah = al; dx = line status of COM1
        'ec a820 74fb'      # until the port is free
        'baf803 88e0 ee'    # dx = COM1; write ah
        'ebe9'              # jump to next
        'f4ebfd')           # halt: for ever
    assert len(code) == text - 0x7c00, len(code)
    code += b'a line of the guest\r\n' * 18 + b'\0'
    return bytes(code.ljust(510, b'\0') + b'\x55\xaa')


class Content:
    """What the suites need in the cloud: made once, by the public APIs."""

    def __init__(self, directory: pathlib.Path) -> None:
        from tests.lab import cloud
        self._cloud = cloud.Cloud()
        api = self._cloud.api
        guest = directory / 'guest.raw'
        guest.write_bytes(boot_sector().ljust(1 << 20, b'\0'))
        self._ids = {
            name: self._cloud.probe().id if hosts.is_machine() else
            self._cloud.image(
                name, str(guest), disk_format='raw', container_format='bare',
                visibility='public').id for name in ('guest-1', 'guest-2')}
        for name, specs in FLAVORS.items():
            self._ids[name] = self._flavor(name, specs)
        public = api.network.find_network('public')
        if public:
            self._ids['public'] = public.id
            return
        for name, function in FUNCTIONS.items():
            self._cloud.bitstream(function)
            pathlib.Path(f'/lab/device_profiles/{name}.yaml').write_text(
                yaml.safe_dump({
                    'name': name, 'accel:live_migration': 'detach',
                    'groups': [{'resources:FPGA': 1,
                                'accel:function_id': function}]}))
        if hosts.is_machine():
            # guests have the whole card, and could have programmed it
            self._cloud.bitstream(properties={
                'accel:clears': 'registers',
                'accel:region_type_id': cloud.INTERFACE})
        for name, cidr, more in (
                ('public', '172.24.4.0/24', {'is_router_external': True}),
                (SHARED, '10.99.0.0/16', {'is_shared': True})):
            network = api.network.create_network(name=name, **more)
            self._ids[name] = network.id
            api.network.create_subnet(
                network_id=network.id, ip_version=4, cidr=cidr,
                enable_dhcp=not more.get('is_router_external', False))

    def _flavor(self, name, specs):
        compute = self._cloud.compute
        flavor = compute.find_flavor(name)
        if not flavor:
            flavor = compute.create_flavor(name=name, ram=64, vcpus=1, disk=1)
            if specs:
                compute.create_flavor_extra_specs(flavor, specs)
        return flavor.id

    def configure(self, suite: Suite, directory: pathlib.Path) -> pathlib.Path:
        """Write tempest.conf into the directory; its path."""
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(CONF / 'tempest.conf')
        for options in ({
                'DEFAULT': {'log_dir': directory},
                'oslo_concurrency': {'lock_path': directory / 'locks'},
                'compute': {
                    'image_ref': self._ids['guest-1'],
                    'image_ref_alt': self._ids['guest-2'],
                    'flavor_ref': self._ids[suite.flavors[0]],
                    'flavor_ref_alt': self._ids[suite.flavors[1]]},
                'whitebox': {'nodes_yaml': directory / 'nodes.yaml'},
                'network': {'public_network_id': self._ids['public']}},
                suite.options):
            for section, values in options.items():
                if section != 'DEFAULT' and not parser.has_section(section):
                    parser.add_section(section)
                for option, value in values.items():
                    parser[section][option] = str(value)
        (directory / 'nodes.yaml').write_text(yaml.safe_dump(whitebox_hosts()))
        path = directory / 'tempest.conf'
        with open(path, 'w') as file:
            parser.write(file)
        return path
