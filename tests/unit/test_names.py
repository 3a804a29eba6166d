# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Names in Placement are a promise: flavors and images ask for them.

tests/unit/data/names.yaml has those of the devices of the simulated host that
the package brings, driver by driver. A name that changes there breaks flavors
of clouds, and needs a release note with what operators must do; so does a
provider's name, by which allocations are found. After a change that is meant,
``python -m tests.unit.test_names`` prints the file.
"""

import importlib.metadata
import pathlib
import sys
import tempfile

import testtools
import yaml

from nova_accel import conf
from nova_accel import drivers
from nova_accel import inventory
from nova_accel import sim
from nova_accel.store import claim_store

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = pathlib.Path(__file__).parent / 'data' / 'names.yaml'
HOST = ROOT / 'etc' / 'nova_accel' / 'simulated-host.yaml'
#: driver -> options without which it gives nothing to servers
DRIVERS = {
    'dfl': {},
    'gpu': {'include_devices': ['address=*']},
    'nvme': {'include_devices': ['address=*']},
    'pci': {'pci_devices': ['vendor=8086 product=a352 type=SATA '
                            'traits=CUSTOM_RACK_7']},
    'qat': {'include_devices': ['address=*']},
    'timecard': {'include_devices': ['address=*']},
    'vgpu': {},
    'xrt': {},
}


def names():
    """{driver: {name of a provider: its classes and traits}}."""
    return {driver: _names(driver, options)
            for driver, options in DRIVERS.items()}


def _names(driver, options):
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, 'host.yaml')
        host = yaml.safe_load(HOST.read_text())
        # as nova-compute has them after its start
        for card in host['cards']:
            card['vfs'] = card.get('ports', 1)
        for card in host['qats']:
            card['vfs'] = 16
        path.write_text(yaml.safe_dump(host))
        options = {'enabled_drivers': list(DRIVERS), **options}
        for option, value in options.items():
            conf.CONF.set_override(option, value, 'accel')
        try:
            kernel = sim.SimulatedKernel(str(path))
            found = inventory.Inventory(
                drivers.load([driver], kernel),
                claim_store.ClaimStore(claim_store.MEMORY), lambda device: '')
            found.scanner.scan()
            providers = found.shown.providers_of(
                'compute1', '00000000-0000-0000-0000-000000000000').values()
            result = {
                provider.name: {'classes': sorted(provider.inventory),
                                'traits': sorted(provider.traits)}
                for provider in providers}
            found.close()
            return result
        finally:
            for option in options:
                conf.CONF.clear_override(option, 'accel')


class NamesTest(testtools.TestCase):

    def test_drivers(self):
        """Each driver of the package is there."""
        self.assertEqual({
            point.name for point in importlib.metadata.entry_points(
                group='nova_accel.drivers')
            if point.value.startswith('nova_accel.')}, set(DRIVERS))

    def test_names(self):
        self.maxDiff = None
        golden = yaml.safe_load(GOLDEN.read_text())
        for driver, found in names().items():
            self.assertTrue(found, driver)
            self.assertEqual(golden[driver], found)


if __name__ == '__main__':
    yaml.safe_dump(names(), sys.stdout)
