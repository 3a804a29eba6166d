# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The accelerators of a host begin: devices are found, claims are read."""

import collections
from collections.abc import Callable
from concurrent import futures
import os

from nova_accel.attach import accelerators as attach
from nova_accel.attach import cloud as novas
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import options
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import sole

CONF = conf.CONF
LOG = logging.getLogger(__name__)


def initialize(host: str, state_path: str, kernel, cloud: novas.Cloud,
               taken_elsewhere: Callable[[model.Device], str],
               ) -> attach.Accelerators:
    """Find the devices and read the claims; ends when both are known.

    :param host: name of this compute host.
    :param state_path: directory for the claim store.
    :param kernel: nova_accel.host.kernel.Kernel or a simulated one.
    :param taken_elsewhere: which of Nova's own options has a device, too.
    :raises AcceleratorsUnavailable: the claim store cannot be used.
    :raises ConfigurationError: [accel] names what is not there, or has a value
        that cannot be read.
    """
    if CONF.accel.enabled_drivers:
        for sentence in conf.malformed():
            raise exception.ConfigurationError(sentence)
    loaded = {}
    for name in CONF.accel.enabled_drivers:
        try:
            loaded.update(drivers.load([name], kernel))
        except exception.UnusableDriver as error:
            # of another package, as a rule, which costs its devices only
            LOG.error('%s', error)
    store = _open_store(
        os.path.join(state_path, claim_store.file_name(host)))
    accelerators = attach.Accelerators(
        cloud, store, host_inventory.Inventory(
            loaded, store, taken_elsewhere), kernel)
    _start(accelerators)
    return accelerators


def _open_store(path):
    try:
        sole.use(path)
        return claim_store.ClaimStore(path)
    except exception.AcceleratorsUnavailable as error:
        if CONF.accel.enabled_drivers:
            raise
        # a host without accelerators works without it
        LOG.error('%s', error)
        return claim_store.ClaimStore(claim_store.MEMORY)


def none(cloud: novas.Cloud) -> attach.Accelerators:
    """Return an empty Accelerators, for use before initialize()."""
    store = claim_store.ClaimStore(claim_store.MEMORY)
    return attach.Accelerators(
        cloud, store, host_inventory.Inventory({}, store))


def _start(accelerators: attach.Accelerators) -> None:
    """Find devices, and put right what a crash or a host boot left.

    :raises ConfigurationError: [accel] names what is not there.
    """
    options.check()
    for sentence in conf.unknown():
        LOG.warning('%s', sentence)
    accelerators.inventory.scanner.configure()
    accelerators.inventory.scanner.scan()
    accelerators.inventory.scanner.check_configuration()
    accelerators.inventory.scanner.watch(accelerators.kernel)
    # what a process that is gone was doing when it went
    accelerators.holdings.doubt(
        [c for c in accelerators.holdings.all() if c.state in (
            model.ClaimState.INITIAL, model.ClaimState.PROVISIONING)],
        'nova-compute stopped while the device was prepared')
    _make_again(accelerators)
    accelerators.orders.start()


def _make_again(accelerators):
    """Create the vGPUs of servers again, which the kernel has forgotten if
    the host booted, before their room goes to others."""
    by_device = collections.defaultdict(list)
    for claim in accelerators.holdings.all():
        if claim.created_type and claim.state is model.ClaimState.BOUND:
            by_device[claim.device_address].append(claim)

    def make(claims):
        for claim in claims:
            try:
                accelerators.device_handles.prepare([claim], fresh=False)
            except Exception as error:
                LOG.error('A vGPU of server %s could not be made again: '
                          '%s', claim.instance_uuid, error)
                if isinstance(error, exception.DeviceTimeout):
                    return
    started = {limited.start(make, claims): address
               for address, claims in by_device.items()}
    _, late = futures.wait(started, CONF.accel.programming_timeout)
    for future in late:
        LOG.error('vGPUs of servers on %s are still being created after '
                  '%d s; the start of nova-compute does not wait for them '
                  'any more', started[future],
                  CONF.accel.programming_timeout)
    accelerators.readiness.rescan_siblings(
        [c for claims in by_device.values() for c in claims])
