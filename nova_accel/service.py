# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Assemble and start the parts of nova_accel in nova-compute.

Host is the plan of a running host: it creates every part and passes it the
parts that it needs.
"""

import collections
from collections.abc import Callable
from concurrent import futures
import os

from nova_accel.admin import healing
from nova_accel.admin import maintenance
from nova_accel.admin import orders
from nova_accel.attach import accelerators
from nova_accel.attach import carrying
from nova_accel.attach import choice as device_choice
from nova_accel.attach import cloud as novas
from nova_accel.attach import descriptions
from nova_accel.attach import following
from nova_accel.attach import guests
from nova_accel.attach import handles as attach_handles
from nova_accel.attach import holdings
from nova_accel.attach import loading
from nova_accel.attach import owner_reports
from nova_accel.attach import programming
from nova_accel.attach import publishing
from nova_accel.attach import readiness
from nova_accel.attach import reconcile
from nova_accel.attach import regions as free_regions
from nova_accel.attach import releases
from nova_accel.attach import reshape
from nova_accel.attach import runtime
from nova_accel.attach import settling as device_settling
from nova_accel.attach import store_age
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import options
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import domains
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.notify import metrics
from nova_accel.notify import notices
from nova_accel.notify import owners
from nova_accel.store import claim_store
from nova_accel.store import file as store_file
from nova_accel.store import keys

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class Host:
    """The parts of nova_accel in one nova-compute; see their classes."""

    def __init__(self, cloud: novas.Cloud, store: claim_store.ClaimStore,
                 inventory: host_inventory.Inventory, kernel=None):
        """Create the parts, without starting them.

        :param kernel: nova_accel.host.kernel.Kernel or a simulated one; None
            before initialize().
        """
        self.kernel = kernel
        self.store = store
        self.inventory = inventory
        self.holdings = holdings.Holdings(store)
        #: held while the claims of a server, or the devices in its running
        #: guest, change. A task that takes it checks the server's task_state
        #: to see whether Nova works on it; Nova's operations call wait()
        #: before they touch devices. Not Nova's own lock: urgent calls would
        #: have to wait for that
        self.servers = locks.Locks('server', 'The accelerators of server {}',
                                   loading.seconds_at_most)
        # providers in Placement, and the age of the store
        self.domains = domains.Domains()
        self.publisher = publishing.Publisher(inventory, cloud)
        self.carrying = carrying.Carrying(store, self.holdings, cloud)
        self.store_age = store_age.StoreAge(
            store, inventory, self.holdings, self.carrying, cloud)
        settling = device_settling.Settling(
            store, inventory, self.holdings, self.publisher, self.store_age,
            cloud)
        self.reshape = reshape.Reshape(inventory, self.holdings, cloud)
        self.following = following.Following(inventory, self.holdings, cloud)
        # the accelerators of servers
        loader = loading.Loader(inventory, self.holdings, cloud)
        self.programming = programming.Programming(
            inventory, self.holdings, self.publisher, loader,
            programming.Attempts(store))
        regions = free_regions.Regions(
            inventory, self.holdings, cloud, loader)
        self.readiness = readiness.Readiness(
            inventory, self.holdings, self.programming, regions)
        handles = attach_handles.Handles(
            inventory, self.holdings, cloud, regions, self.readiness,
            self.publisher)
        self.releases = releases.Releases(
            self.holdings, handles, self.publisher, self.servers)
        choice = device_choice.Choice(
            kernel, store, inventory, self.holdings, self.readiness, regions,
            self.releases)
        self.accelerators = accelerators.Accelerators(
            cloud, inventory, self.holdings, self.publisher, self.readiness,
            settling, self.reshape, choice, self.servers, self.releases,
            self.carrying, self.following)
        self.guests = guests.Guests(
            cloud, inventory, self.holdings, self.servers, self.accelerators,
            choice, self.releases)
        self.descriptions = descriptions.Descriptions(
            inventory, self.holdings, self.readiness, self.accelerators)
        self.reconciler = reconcile.Reconciler(
            cloud, inventory, self.holdings, settling, self.servers,
            self.releases, self.accelerators, self.carrying, self.guests,
            self.readiness, self.publisher, self.following)
        self.runtime = runtime.RuntimeProgramming(
            cloud, inventory, self.holdings, self.programming, self.readiness,
            self.servers, self.carrying, owner_reports.OwnerReports(
                cloud, store, self.holdings))
        # reports to users, operators and metrics
        self.usage = notices.Usage(cloud, store, inventory, self.holdings)
        self.metrics = metrics.MetricsFile(
            store, inventory, loader, self.usage)
        self.notices = notices.Notices(
            cloud, store, inventory, self.holdings, self.usage)
        self.owners = owners.Owners(
            cloud, inventory, self.holdings, self.reconciler)
        self.paused = owners.Paused(cloud, inventory, self.holdings)
        # orders of the operator
        self.healing = healing.Healing(cloud, inventory, self.holdings)
        self.maintenance = maintenance.Maintenance(
            cloud, kernel, store, inventory, self.holdings, self.publisher,
            regions, self.servers, self.releases, self.reconciler)
        self.orders = orders.Orders(store, inventory, self.publisher, {
            'clean': self.maintenance.clean,
            'program': self.maintenance.program,
            'release': self.maintenance.release,
            signals.DRILL: self.maintenance.drill,
        })
        #: background work after each look for changes
        self.after_look: tuple[limited.Background, ...] = (
            self.publisher.background,
            self.publisher.changes,
            self.paused.background,
            self.owners.background,
            self.notices.background,
            self.metrics.background,
            self.domains.background,
            self.healing.background,
        )

    def report(self, tree, node: str, allocations: dict | None = None,
               starting: bool = False, edition: object = None) -> bool:
        """Write the providers of this host into Nova's provider tree. Nova's
        resource tracker calls this and holds its lock.

        :param tree: nova.compute.provider_tree.ProviderTree of the host.
        :param node: name of the root provider.
        :param allocations: allocations of the host, or None. If given, they
            are changed in place, and Nova writes them with the tree.
        :param starting: whether Nova can call again with allocations, which it
            does only at its start.
        :param edition: a state of the tree; see
            inventory.tree.Tree.update().
        :returns: False if allocations have to move to other providers. Nothing
            is changed then, and the caller calls again with the allocations.
        """
        if not self.store_age.before_report(tree, node):
            return True
        self.domains.show(tree, node)
        shown, root_uuid = self.inventory.shown, tree.data(node).uuid
        if allocations is not None:
            moved = self.reshape.move(
                allocations, shown.providers_of(node, root_uuid))
            shown.update_tree(
                tree, node, self.publisher.placement_at_start(allocations),
                moved)
            return True
        if self.reshape.is_needed(node, root_uuid) and starting:
            return False
        # Nova's copy of a provider is older than the last server that was
        # scheduled to it; Placement would refuse an update from it
        shown.update_tree(tree, node, self.publisher.placement(),
                          edition=edition)
        return True

    def begin(self) -> None:
        """Compare the claims with the guests. Called after libvirt first
        answers, and before Nova uses a claim."""
        self.store_age.begin()
        # count the use only of claims that are left
        for go_on in self.usage.resume, self.metrics.go_on:
            try:
                go_on()
            except Exception as error:
                LOG.warning('The use of devices while nova-compute did not run '
                            'is not counted yet (%s); nova-compute tries again',
                            error)

    def close(self) -> None:
        """Stop the scans of devices. A plug that is in progress ends first."""
        self.guests.close()
        self.orders.close()
        self.inventory.close()


def initialize(host: str, state_path: str, kernel, cloud: novas.Cloud,
               taken_elsewhere: Callable[[model.Device], str],
               ) -> Host:
    """Assemble the parts of a host, find its devices, and read the claims.

    :param host: name of this compute host.
    :param state_path: directory of the claim store.
    :param taken_elsewhere: returns the option with which Nova itself also uses
        a device.
    :raises AcceleratorsUnavailable: the claim store cannot be used.
    :raises ConfigurationError: [accel] names something that does not exist, or
        has a value that cannot be read.
    """
    if CONF.accel.enabled_drivers:
        for sentence in conf.malformed():
            raise exception.ConfigurationError(sentence)
    loaded = {}
    for name in CONF.accel.enabled_drivers:
        try:
            loaded.update(drivers.load([name], kernel))
        except exception.UnusableDriver as error:
            # usually of another package; only its devices are missing
            LOG.error('%s', error)
    store = _open_store(
        os.path.join(state_path, claim_store.file_name(host)))
    found = Host(cloud, store, host_inventory.Inventory(
        loaded, store, taken_elsewhere), kernel)
    _start(found)
    return found


def _open_store(path):
    try:
        store_file.use_alone(path)
        store = claim_store.ClaimStore(path)
        _sign(store)
        return store
    except exception.AcceleratorsUnavailable as error:
        if CONF.accel.enabled_drivers:
            raise
        # a host without accelerators needs no store
        LOG.error('%s', error)
        return claim_store.ClaimStore(claim_store.MEMORY)


def _sign(store):
    """Let the key of this host sign hand-overs. Create it at the first start.

    :raises AcceleratorsUnavailable: the key cannot be used.
    """
    path = store.path + keys.SUFFIX
    former = keys.load(store.path + keys.FORMER)
    if cards := store.sign_with(
            keys.load(path) or keys.create(path), former):
        LOG.warning(
            'A new key signs the hand-overs of %d devices from now on; %s',
            cards, 'the former key has announced it' if former
            else f'no former key has announced it: that in {path} was lost')
    if former:
        # the former key has announced the present one, in the journal
        os.unlink(store.path + keys.FORMER)


def none(cloud: novas.Cloud) -> Host:
    """Return a host without devices, for use before initialize()."""
    store = claim_store.ClaimStore(claim_store.MEMORY)
    return Host(cloud, store, host_inventory.Inventory({}, store))


def _start(host: Host) -> None:
    """Find devices, and continue or repair work that a crash of nova-compute
    or a boot of the host interrupted.

    :raises ConfigurationError: [accel] names something that does not exist.
    """
    options.check()
    for sentence in conf.unknown():
        LOG.warning('%s', sentence)
    host.domains.begin()
    host.inventory.scanner.configure()
    host.inventory.scanner.scan()
    host.inventory.configuration.check()
    host.inventory.looks.watch(host.kernel, host.after_look)
    # the previous process may have left these claims half prepared
    host.holdings.doubt(
        [c for c in host.holdings.all() if c.state in (
            model.ClaimState.INITIAL, model.ClaimState.PROVISIONING)],
        'nova-compute stopped while the device was prepared')
    host.following.run()
    _make_again(host)
    host.orders.start()


def _make_again(host):
    """Create the vGPUs of existing servers again, because they vanish when the
    host boots. This runs before new servers can take the capacity."""
    by_device = collections.defaultdict(list)
    for claim in host.holdings.all():
        if claim.created_type and claim.state is model.ClaimState.BOUND:
            by_device[claim.device_address].append(claim)

    def make(claims):
        for claim in claims:
            try:
                host.readiness.prepare([claim], fresh=False)
            except Exception as error:
                LOG.error('The vGPU of server %s could not be created again: '
                          '%s', claim.instance_uuid, error)
                if isinstance(error, exception.DeviceTimeout):
                    return
    started = {limited.start(make, claims): address
               for address, claims in by_device.items()}
    _, late = futures.wait(started, CONF.accel.programming_timeout)
    for future in late:
        LOG.error('vGPUs of servers on %s are still being created after '
                  '%d s; nova-compute starts without waiting for them',
                  started[future], CONF.accel.programming_timeout)
    host.readiness.rescan_siblings(
        [c for claims in by_device.values() for c in claims])
