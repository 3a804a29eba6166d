# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What can go wrong, each in one sentence: asked, found, what to do."""


class AcceleratorError(Exception):
    """Base of all of ours.

    elsewhere says whether another host may do what this one could not; Nova
    then reschedules the build, otherwise it aborts it.
    """

    elsewhere = True


class InvalidRequest(AcceleratorError):
    """A flavor, profile or extra spec that means nothing on any host."""

    elsewhere = False


class InvalidProfile(InvalidRequest):
    """A device profile that is unknown or malformed."""


class InvalidName(AcceleratorError):
    """A name that cannot become a trait or resource class."""

    elsewhere = False


class InvalidSimulation(AcceleratorError):
    """A simulated host's file that cannot be read."""


class BitstreamError(AcceleratorError):
    """An image that is missing, unreadable, or not what it says."""

    elsewhere = False


class GlanceUnavailable(AcceleratorError):
    """Glance did not answer; nothing is known of the image."""


class PlacementUnavailable(AcceleratorError):
    """Placement did not answer; nothing is known of the allocation."""


class IncompatibleBitstream(AcceleratorError):
    """A good bitstream for another type of region."""


class ProgrammingFailed(AcceleratorError):
    """The card refused the bitstream or did not come back from it."""


class DeviceError(AcceleratorError):
    """A device could not be read or written."""


class DeviceTimeout(DeviceError):
    """A hardware call did not return in time and may still be running."""


class DeviceBusy(DeviceTimeout):
    """A hardware call could not begin in time, as another one goes on."""


class DeviceUnavailable(AcceleratorError):
    """The allocated device is gone, taken or quarantined on this host."""


class DeviceDetached(DeviceError):
    """A running server lost a device that was to be programmed anew."""


class ClaimConflict(DeviceUnavailable):
    """The attach handle is held by another server."""


class AcceleratorsUnavailable(AcceleratorError):
    """The accelerators of this host could not be initialized."""


class ConfigurationError(AcceleratorError):
    """nova.conf asks for something that cannot be."""


class IllegalTransition(AcceleratorError):
    """A state was to be left by a way that its table does not have; a defect
    of nova_accel, never of the request."""
