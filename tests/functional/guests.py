# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What guests read, and snapshots of their disks."""

import json

import fixtures
from lxml import etree
from nova.api.metadata import base as metadata
from nova import context as nova_context
from nova import objects
from nova.virt.libvirt import driver as libvirt_driver


class Reads:

    def devices(self, server):
        """As a guest reads them, in the newest version."""
        instance = objects.Instance.get_by_uuid(
            nova_context.get_admin_context(), server['id'],
            expected_attrs=['device_metadata', 'flavor', 'metadata',
                            'system_metadata', 'keypairs', 'ec2_ids'])
        found = metadata.InstanceMetadata(
            instance, network_info=[]).lookup(
                '/openstack/latest/meta_data.json')
        return json.loads(found)['devices']

    def places(self, server):
        """Host address -> guest address, as libvirt has it."""
        found = {}
        for hostdev in etree.fromstring(self.guest_xml(server)).iterfind(
                './devices/hostdev'):
            host, guest = (
                '{:04x}:{:02x}:{:02x}.{:x}'.format(*(
                    int(place.get(part), 16) for part in (
                        'domain', 'bus', 'slot', 'function')))
                for place in hostdev.iterfind('.//address'))
            found[host] = guest
        return found


def live_snapshot(driver, context, instance, guest, disk, path, *args):
    """In place of the copy of a disk, which guests do not have here."""
    with open(path, 'wb') as file:
        file.write(b'a disk')


class LiveSnapshots(fixtures.Fixture):

    def _setUp(self):
        self.useFixture(fixtures.MockPatchObject(
            libvirt_driver.LibvirtDriver, '_live_snapshot', live_snapshot))
        # Nova takes what is in /dev for a volume of LVM, as the files of tests
        # below /dev/shm, and makes cold snapshots of these
        self.useFixture(fixtures.MockPatch(
            'nova.virt.libvirt.utils.get_disk_type_from_path',
            return_value='raw'))
