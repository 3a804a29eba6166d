# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The door by which nova-compute finds ``nova.virt.accel``.

Nova imports a compute driver as a module of the package ``nova.virt``, which
Python looks for in Nova's own directory only (docs/source/contributor, *The
door*). Hence this module adds its directory to the package ``nova.virt``
before Nova imports the driver.
"""

import logging
import os

from nova import virt
from os_vif import plugin

LOG = logging.getLogger(__name__)


def open_door() -> None:
    """Let Python find ``nova.virt.accel``, whichever way Nova is installed.

    Nova's own modules come first. A second call changes nothing.
    """
    directory = os.path.dirname(__file__)
    if directory not in virt.__path__:
        virt.__path__.append(directory)


class Plugin(plugin.PluginBase):
    """A plug-in of os-vif that opens the door, and serves no VIF.

    nova-compute (31 to 34) loads all plug-ins of os-vif before its driver:
    os_vif.initialize() in main() of nova/cmd/compute.py.
    """

    @classmethod
    def load(cls, plugin_name):
        # os_vif.initialize() (3.1 to 5.3) does not guard this call: an error
        # would end nova-compute, also with another driver
        try:
            open_door()
        except Exception as error:
            LOG.error('nova.virt.accel cannot be found by nova-compute (%s): '
                      'install this release of nova_accel again, or another '
                      'one for this Nova.', error)
        return super().load(plugin_name)

    def describe(self):
        from os_vif.objects import host_info
        return host_info.HostPluginInfo(plugin_name='nova_accel', vif_info=[])

    def plug(self, vif, instance_info):
        """Do nothing: no VIF names this plug-in."""

    def unplug(self, vif, instance_info):
        """Do nothing, as plug()."""
