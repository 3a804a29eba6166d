# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Programming ahead: idle regions get what servers will ask for.

Each host counts what is asked for in the servers that are built on it, and
asks Placement how many regions of the cloud have a function, idle and in use:
those in use count as requests. Without that answer nothing is programmed: hosts
that know only of themselves all load the same few functions
(tests.bench.reuse).

A region is programmed ahead when it is idle, its content is missed less than
what it gets (demand.Demand.losses()), and the operator has an image that
fits. One region at a time, and [accel] program_ahead looks at Placement in an
hour. No build waits for it, unless the card is touched already when the build
claims the region: Programming.ahead().
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
import dataclasses
import time
from typing import Any

from oslo_log import log as logging

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import programming as region_programming
from nova_accel.attach import publishing
from nova_accel import conf
from nova_accel import demand as demands
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import model
from nova_accel import naming
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: requests for functions that are remembered
_MOST = 1000
#: how many of these, those asked for most often here, are looked for in
#: Placement at each look
_LOOKED_FOR = 20

Asked = Collection[request.AcceleratorRequest]


def choices(demand: demands.Demand, asked: Asked,
            regions: Mapping[str, tuple[str, ...]], idle: Mapping[str, int],
            used: Mapping[str, int],
            ) -> Iterator[tuple[request.AcceleratorRequest, str]]:
    """Return what to program ahead, and where, the best first.

    :param asked: what servers asked for.
    :param regions: the idle regions of this host by any key: traits of what
        they carry, () for nothing.
    :param idle: trait -> number of idle regions that have it, those of regions
        among them; read only where it is needed.
    :param used: trait -> number of regions in use that have it; as idle.
    """
    traits = {wanted: wanted.wanted_traits for wanted in asked}
    counts = demand.counts({t for found in traits.values() for t in found})
    # the first of alternatives is the one that is programmed
    often = sorted(traits, key=lambda wanted: counts[traits[wanted][0]],
                   reverse=True)[:_LOOKED_FOR]
    gains = {wanted: counts[traits[wanted][0]] + used[traits[wanted][0]]
             for wanted in often
             if not any(idle[trait] for trait in traits[wanted])}
    if not gains:
        return
    losses = demand.losses(set(regions.values()), idle, used)
    for wanted in sorted(gains, key=gains.__getitem__, reverse=True):
        for key in sorted(regions, key=lambda key: losses[regions[key]]):
            if losses[regions[key]] < gains[wanted]:
                yield wanted, key


class _Lazily(dict):
    """What a function returns for each key, asked for once."""

    def __init__(self, function: Callable[[str], Any]):
        super().__init__()
        self._function = function

    def __missing__(self, key):
        self[key] = self._function(key)
        return self[key]


@dataclasses.dataclass(frozen=True)
class _Idle:
    """A region that no server has."""

    device: model.Device
    region: model.Region
    resource_class: str
    #: handles that can be given from it
    total: int
    #: of what it carries
    content: tuple[str, ...]


class Ahead:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 programming: region_programming.Programming,
                 publisher: publishing.Publisher, cloud: novas.Cloud):
        self._inventory = inventory
        self._holdings = holdings
        self._programming = programming
        self._publisher = publisher
        self._cloud = cloud
        self._demand = demands.Demand()
        #: guards the two below
        self._lock = locks.Lock('ahead')
        self._asked: list[request.AcceleratorRequest] = []
        #: regions where it failed, until a server had them
        self._failed: set[tuple[str, int | None]] = set()
        #: a process that is started again and again programs nothing
        self._looked_at = time.monotonic()
        self._background = limited.Background(self._logged_run)

    def count(self, wanted: request.AcceleratorRequest,
              claims: Iterable[model.Claim]) -> None:
        """Count what one server asked for that got devices here."""
        with self._lock:
            self._failed.difference_update(
                (c.device_address, c.region_index) for c in claims)
        if not wanted.programs or wanted.chosen_by_owner:
            # nova-scheduler does not look for what the owner chose
            return
        self._demand.add(wanted.wanted_traits)
        plain = dataclasses.replace(wanted, group='', amount=1, memory={},
                                    runtime_programming=False)
        with self._lock:
            # the newest last
            self._asked = [*(other for other in self._asked
                             if other != plain)][1 - _MOST:] + [plain]

    def run_if_due(self) -> None:
        """Program one region in the background, if it is time."""
        if self._is_due():
            self._background.start()

    def _is_due(self):
        return CONF.accel.program_ahead and (
            time.monotonic() - self._looked_at
            >= 3600 / CONF.accel.program_ahead)

    def _logged_run(self):
        try:
            self.run()
        except exception.AcceleratorError as error:
            LOG.warning('No region is programmed ahead now: %s', error)
        except Exception:
            LOG.exception('Programming ahead failed')

    def run(self) -> bool:
        """Program one region now, if it is time; True where that was tried.

        :raises GlanceUnavailable: Glance did not answer nova-compute itself.
        :raises PlacementUnavailable: Placement did not answer.
        """
        idle = self._idle() if self._is_due() else {}
        with self._lock:
            asked = list(self._asked)
        here: dict[str, dict[tuple[str, ...], int]] = {}
        for found in idle.values():
            contents = here.setdefault(found.resource_class, {})
            contents[found.content] = contents.get(found.content, 0) + 1
        copies = {name: demands.copies(contents)
                  for name, contents in here.items()}
        for name in sorted(here):
            wanted = [w for w in asked if w.resource_class == name
                      and copies[name].keys().isdisjoint(w.wanted_traits)]
            if not wanted:
                # each has an idle region here: Placement is not asked
                continue
            self._looked_at = time.monotonic()
            regions = {uuid: found.content for uuid, found in idle.items()
                       if found.resource_class == name}
            for choice, uuid in choices(self._demand, wanted, regions,
                                        *self._cloud_has(name, copies[name])):
                if self._fits(choice, uuid, idle[uuid]) and self._program(
                        choice, uuid, idle[uuid]):
                    return True
        return False

    def _cloud_has(self, resource_class, here):
        """Trait -> idle regions, and trait -> those in use: here as they are,
        elsewhere as Placement shows them.

        :param here: idle regions of this host by trait.
        """
        mine = self._inventory.providers().keys()
        free = _Lazily(lambda trait: self._cloud.find_providers(
            {resource_class: 1}, trait))
        return (_Lazily(lambda trait: here.get(trait, 0)
                        + len(free[trait] - mine)),
                _Lazily(lambda trait: len(self._cloud.find_providers(
                    trait=trait) - free[trait])))

    def _held(self):
        return {(c.device_address, c.region_index)
                for c in self._holdings.all()}

    def _idle(self) -> dict[str, _Idle]:
        """The regions that may be programmed, by the uuid of the provider."""
        with self._lock:
            barred = self._failed | self._held()
        waiting = self._holdings.waiting()
        devices, found = self._inventory.devices, {}
        for uuid, provider in self._inventory.providers().items():
            address, index = provider.addresses[0], provider.region_index
            device = devices.get(address)
            if (index is None or device is None or provider.fenced
                    or (address, index) in barred
                    or device.health is not model.Health.OK
                    or self._inventory.cards.is_busy(address)):
                continue
            region = next((r for r in device.regions if r.index == index),
                          None)
            if (region and region.programmable and region.handles
                    and region.health is model.Health.OK
                    and waiting.isdisjoint(region.handles)):
                for name, total in naming.accelerators(
                        provider.inventory).items():
                    found[uuid] = _Idle(device, region, name, total, tuple(
                        sorted(filter(naming.is_content, provider.traits))))
        return found

    def _fits(self, wanted, provider_uuid, idle):
        """Whether the server that comes could get the region."""
        for allocation in self._inventory.allocated({provider_uuid: {
                'resources': {idle.resource_class: 1}}}):
            asked = {t for t in wanted.required if not naming.is_volatile(t)}
            return (asked <= allocation.traits
                    and not wanted.forbidden & allocation.traits)
        return False

    def _program(self, wanted, provider_uuid, idle):
        """Program a region and show it; False where another choice may do."""
        device, region = idle.device, idle.region
        key = device.address, region.index

        def is_free():
            return provider_uuid in self._cloud.find_providers(
                {idle.resource_class: idle.total}, uuid=provider_uuid)

        def is_idle():
            # busy is the card now by this very call
            now = self._inventory.devices.get(device.address)
            return (now is not None and now.health is model.Health.OK
                    and region in now.regions
                    and self._holdings.waiting().isdisjoint(region.handles)
                    and key not in self._held())
        if not is_free():
            # a server is about to get it, or the operator has reserved it
            return False
        try:
            image = self._programming.ahead(
                device, region, wanted, is_free, is_idle)
        except (exception.BitstreamError, exception.IncompatibleBitstream,
                exception.DeviceUnavailable, exception.DeviceBusy) as error:
            LOG.info('Nothing is programmed ahead for %s: %s',
                     wanted.wanted_traits[0], error)
            return False
        except (exception.ProgrammingFailed, exception.DeviceError) as error:
            # programmed again and again it would use up what others could get
            with self._lock:
                self._failed.add(key)
            LOG.warning('%s %s was to be programmed ahead, and is left alone '
                        'until a server had it: %s', device.address,
                        region.name, error)
            self._programming.record(device, region, 'none', str(error))
            return True
        if image is None:
            # it was there without the name, and the next look counts it
            return True
        LOG.info('%s %s was programmed ahead with image %s, because %s is '
                 'asked for and no idle region has it', device.address,
                 region.name, image, wanted.wanted_traits[0])
        self._programming.record(
            device, region, f'programmed ahead with image {image}', 'ahead')
        self._publisher.show(self._cloud.admin_context(), [provider_uuid])
        return True
