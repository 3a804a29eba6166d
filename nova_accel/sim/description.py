# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The YAML file that describes a simulated host; see the sample in etc."""

import dataclasses

from nova_accel.sim import card
from nova_accel.sim import dfl
from nova_accel.sim import gpu
from nova_accel.sim import nic
from nova_accel.sim import nvme
from nova_accel.sim import qat
from nova_accel.sim import reader
from nova_accel.sim import timecard
from nova_accel.sim import vgpu
from nova_accel.sim import xrt

#: list of the file -> what its items are
KINDS: dict[str, type[card.Card]] = {
    'cards': dfl.DflCard,
    'gpus': gpu.GpuCard,
    'nics': nic.NicCard,
    'nvmes': nvme.NvmeCard,
    'alveos': xrt.XrtCard,
    'qats': qat.QatCard,
    'timecards': timecard.TimeCard,
    'clocks': timecard.ClockCard,
    'vgpus': vgpu.VgpuCard,
    'mdev_parents': vgpu.MdevParent,
    'others': card.Card,
}


@dataclasses.dataclass(frozen=True)
class Host:
    iommu: bool
    #: the parameter of the module vfio_pci
    disable_denylist: bool
    cards: dict[str, card.Card]


def load(path: str) -> Host:
    """Read a description.

    :raises InvalidSimulation: naming file, line and key.
    """
    top = reader.compose(path)
    host = Host(
        iommu=top.take('iommu', reader.boolean, True), cards={},
        disable_denylist=top.take('disable_denylist', reader.boolean, False))
    used = set()
    for key, kind in KINDS.items():
        for item in top.sequence(key):
            found = kind(**kind.describe(item))
            item.done()
            item.claim(used, found.addresses())
            host.cards[found.address] = found
    top.done()
    return host
