# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The health of devices: what is read of them, and what that means.

===========  ===============================================================
signals      pure: the table of signals, and what each means
watch        pure: readings of all devices, round by round -> findings
===========  ===============================================================

What is read is in the drivers (drivers.base.AcceleratorDriver.health) and in
host.bus. What follows from a finding is in inventory.devices.
"""
