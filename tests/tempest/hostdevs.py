# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute with the real libvirt, whose guests get simulated devices.

QEMU cannot give a guest a device that does not exist. Hence the binding of
libvirt is patched: a domain that Nova defines keeps its <hostdev> elements in
its metadata, and XMLDesc() returns them in their place. While the guest runs,
the simulated kernel of the host has its functions bound to VFIO. As with
libvirt itself, a guest with hostdevs cannot be saved, and does not migrate with
functions of plain vfio-pci.

The first argument is the description of the host's devices, the others are
those of nova-compute.
"""

import contextlib
import pathlib
import sys
import threading
import time

import libvirt
from lxml import etree
from nova.cmd import compute
import nova.conf

# the last place: nova_accel is that of the wheel
sys.path.append(str(pathlib.Path(__file__).parents[2]))

from nova_accel import sim  # noqa: E402
from tests.tempest import domains  # noqa: E402
from tests.tempest.domains import hide, hold, key_of, show  # noqa: E402

LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
CONFIG = libvirt.VIR_DOMAIN_AFFECT_CONFIG
INACTIVE = libvirt.VIR_DOMAIN_XML_INACTIVE
#: libvirt's own methods
describe = libvirt.virDomain.XMLDesc


def held(domain, flags=0) -> list:
    return etree.fromstring(describe(domain, flags)).findall(
        f'./metadata/{domains.HOLDER}/hostdev')


def error(text, code=libvirt.VIR_ERR_OPERATION_INVALID):
    raised = libvirt.libvirtError(text)
    raised.err = (code, libvirt.VIR_FROM_QEMU, text, libvirt.VIR_ERR_ERROR,
                  '', '', '', 0, 0)
    return raised


class Guests:
    """What the guests of this host have of its simulated kernel."""

    def __init__(self, kernel):
        self._kernel = kernel
        self._lock = threading.RLock()
        #: device -> whether libvirt manages it
        self._managed = {}

    def take(self, hostdevs) -> None:
        """Give devices to a guest.

        :raises libvirtError: a guest has one, or the kernel refuses.
        """
        for hostdev in hostdevs:
            self._managed[key_of(hostdev)] = hostdev.get('managed') == 'yes'
        keys = [key_of(hostdev) for hostdev in hostdevs]
        managed = [key for key in keys if self._managed[key]]
        try:
            if managed:
                self._kernel.guest_takes(*managed)
            for key in set(keys) - set(managed):
                self._kernel.guest_opens(key)
        except OSError as e:
            raise error(f'internal error: hostdevs {keys}: {e}')

    def follow(self, connection) -> None:
        """Have the kernel show what the guests have that run now: a guest also
        ends without a call, and comes by a migration."""
        has = {}
        for domain in connection.listAllDomains(
                libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
            # else it ended in between
            with contextlib.suppress(libvirt.libvirtError):
                has.update((key_of(hostdev), hostdev)
                           for hostdev in held(domain))
        there = set(self._kernel._look()[1]['guests'])
        for key in there - has.keys():
            if self._managed.get(key, ':' in key):
                self._kernel.guest_returns(key)
            else:
                self._kernel.guest_closes(key)
        self.take([has[key] for key in has.keys() - there])

    def watch(self) -> None:
        connection = None
        while True:
            time.sleep(0.3)
            try:
                connection = connection or libvirt.open(
                    nova.conf.CONF.libvirt.connection_uri or None)
                with self._lock:
                    self.follow(connection)
            except (libvirt.libvirtError, OSError) as e:
                print(f'hostdevs: {e}', file=sys.stderr, flush=True)
                connection = None

    def install(self) -> None:
        domain, connection = libvirt.virDomain, libvirt.virConnect
        for name in ('defineXML', 'defineXMLFlags', 'createXML'):
            self._patch(connection, name, lambda call, conn, xml, *args: call(
                conn, hide(xml), *args))
        domain.XMLDesc = lambda dom, flags=0: show(describe(dom, flags))
        for name in ('create', 'createWithFlags'):
            self._patch(domain, name, self._create)
        for name in ('destroy', 'destroyFlags', 'shutdown'):
            self._patch(domain, name, self._end)
        self._patch(domain, 'managedSave', self._save)
        self._patch(domain, 'migrateToURI3', self._migrate)
        self._patch(domain, 'attachDeviceFlags', self._attach)
        self._patch(domain, 'detachDeviceFlags', self._detach)

    def _patch(self, owner, name, replacement):
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: replacement(
            original, *args, **kwargs))

    def _create(self, call, domain, *args):
        with self._lock:
            self.take(held(domain, INACTIVE))
            try:
                return call(domain, *args)
            finally:
                self.follow(domain.connect())

    def _end(self, call, domain, *args):
        with self._lock:
            result = call(domain, *args)
            self.follow(domain.connect())
            return result

    def _save(self, call, domain, *args):
        if held(domain):
            raise error('Requested operation is not valid: domain has '
                        'assigned non-USB host devices')
        return call(domain, *args)

    def _migrate(self, call, domain, uri, params, flags=0):
        if any(hostdev.get('managed') == 'yes' and self._kernel.vfio_module(
                key_of(hostdev)) == 'vfio_pci' for hostdev in held(domain)):
            raise error("Requested operation is not valid: cannot migrate a "
                        "domain with <hostdev mode='subsystem' type='pci'>")
        return call(domain, uri, {
            name: hide(value) if name in (
                libvirt.VIR_MIGRATE_PARAM_DEST_XML,
                libvirt.VIR_MIGRATE_PARAM_PERSIST_XML) else value
            for name, value in params.items()}, flags)

    def _attach(self, call, domain, xml, flags=0):
        device = etree.fromstring(xml)
        if device.tag != 'hostdev':
            return call(domain, domains.as_files(xml), flags)
        with self._lock:
            if self._affected(domain, flags) & LIVE:
                self.take([device])
            self._change(domain, flags, lambda there: [*there, device])
            return 0

    def _detach(self, call, domain, xml, flags=0):
        device = etree.fromstring(xml)
        if device.tag != 'hostdev':
            result = call(domain, domains.as_files(xml), flags)
            if self._affected(domain, flags) & LIVE:
                # guests have no operating system that would release it; QEMU
                # removes it during a reset (hw/acpi/pcihp.c)
                domain.reset()
            return result
        key = key_of(device)

        def rest(there):
            left = [hostdev for hostdev in there if key_of(hostdev) != key]
            if len(left) == len(there):
                raise error(f'device not found: host pci device {key} not '
                            f'found', libvirt.VIR_ERR_DEVICE_MISSING)
            return left
        with self._lock:
            self._change(domain, flags, rest)
            self.follow(domain.connect())
            return 0

    @staticmethod
    def _affected(domain, flags):
        return flags & (LIVE | CONFIG) or (
            LIVE if domain.isActive() else CONFIG)

    def _change(self, domain, flags, change):
        affected = self._affected(domain, flags)
        for part, look in ((LIVE, 0), (CONFIG, INACTIVE)):
            if affected & part and (part == LIVE or domain.isPersistent()):
                left = change(held(domain, look))
                # libvirt adds the namespace
                domain.setMetadata(
                    libvirt.VIR_DOMAIN_METADATA_ELEMENT,
                    etree.tostring(hold(left, 'hostdevs'), encoding='unicode')
                    if left else None, 'accel', domains.NAMESPACE, part)


def main():
    guests = Guests(sim.SimulatedKernel(sys.argv.pop(1)))
    guests.install()
    threading.Thread(target=guests.watch, daemon=True).start()
    compute.main()


if __name__ == '__main__':
    sys.argv[0] = 'nova-compute'
    main()
