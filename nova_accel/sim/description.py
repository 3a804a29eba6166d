# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The YAML file that describes a simulated host; see the sample in etc."""

import importlib.metadata

from nova_accel import exception
from nova_accel.sim import card
from nova_accel.sim import dfl
from nova_accel.sim import gpu
from nova_accel.sim import nvme
from nova_accel.sim import qat
from nova_accel.sim import reader
from nova_accel.sim import timecard
from nova_accel.sim import vgpu
from nova_accel.sim import xrt

#: list in the file -> class of its items
KINDS: dict[str, type[card.Card]] = {
    'cards': dfl.DflCard,
    'gpus': gpu.GpuCard,
    'nics': card.NicCard,
    'nvmes': nvme.NvmeCard,
    'alveos': xrt.XrtCard,
    'qats': qat.QatCard,
    'timecards': timecard.TimeCard,
    'clocks': timecard.ClockCard,
    'vgpus': vgpu.VgpuCard,
    'mdev_parents': vgpu.MdevParent,
    'others': card.Card,
}


#: methods of card.Card: a kind that overrides neither does not change with time
_TIMELESS = card.Card.settle, card.Card.is_busy
#: entry points of kinds of other packages: list in the file -> class
NAMESPACE = 'nova_accel.simulated_devices'


def _of_other_packages(names) -> dict[str, type[card.Card]]:
    """Return name -> class for kinds of cards that other packages define."""
    found = {}
    for point in importlib.metadata.entry_points(group=NAMESPACE):
        if point.name in names:
            try:
                found[point.name] = point.load()
            except Exception as error:
                raise exception.InvalidSimulation(
                    f'The simulated devices {point.name!r} cannot be loaded '
                    f'from {point.value} ({type(error).__name__}: {error}): '
                    f'repair their package.') from error
    return found


def load(path: str) -> card.Host:
    """Read a description.

    :raises InvalidSimulation: the file is malformed; the error names file,
        line and key.
    """
    top = reader.compose(path)
    host = card.Host(
        iommu=top.take('iommu', reader.boolean, True), cards={},
        disable_denylist=top.take('disable_denylist', reader.boolean, False),
        address_bits=top.take('address_bits', reader.natural, 46),
        iova_bitmap=top.take('iova_bitmap', reader.boolean, True),
        iommufd=top.take('iommufd', reader.boolean, False),
        huge_pages=top.take('huge_pages', reader.counts, {}))
    used: set[str] = set()
    bridges: dict[str, reader.Mapping] = {}
    others = set(top.items).difference(KINDS)
    for key, kind in (KINDS | _of_other_packages(others) if others
                      else KINDS).items():
        for item in top.sequence(key):
            found = kind(**kind.describe(item))
            item.done()
            item.claim(used, found.addresses())
            bridges.update({bridge: item for bridge in found.bridges[1:]})
            host.cards[found.address] = found
            if (kind.settle, kind.is_busy) != _TIMELESS:
                host.timed[found.address] = found
    for bridge, item in bridges.items():
        if bridge in used:
            raise item.error('bridges', None, f'has {bridge}, which another '
                             f'device of the file has')
    top.done()
    return host
