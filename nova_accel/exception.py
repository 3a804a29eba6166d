# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Errors. Each message is one sentence: asked, found, what to do."""

from collections.abc import Callable
import re

from nova_accel import text

#: characters that Nova keeps of a fault (compute_utils.exception_to_dict, Nova
#: 31 to 34), and of a value of metadata
FAULT = 255
#: an absolute path, but no part of a URL
_PATH = re.compile(r"""(?<![\w:/])/[^\s'"`,;()]*[^\s'"`,;().:]""")
#: where a service is, in an error of nova_accel
_ADDRESS = re.compile(r' at https?://\S+')
#: what Nova does then, which its owner need not know, and no last host does
_RETRIED = re.compile(r': the build is retried on another host\.$')
_IN_THE_LOG = 'the reason is in the log of nova-compute, ask the operator.'


class AcceleratorError(Exception):
    """Base of all errors of nova_accel."""

    #: whether another host may succeed: Nova then reschedules the build,
    #: otherwise it aborts it
    elsewhere = True

    def __init__(self, *args: object, found: str = ''):
        """
        :param args: the sentence, for the operator.
        :param found: what the owner of a server reads in its place, without a
            full stop; '' for the whole sentence. Why a device is fenced, and
            what the kernel said, is for the operator.
        """
        super().__init__(*(text.one_line(arg) if isinstance(arg, str)
                           else arg for arg in args))
        self.found = text.one_line(found)

    def format_message(self) -> str:
        """Return for_owner() of this error, which Nova makes the fault of a
        server (nova.compute.utils.exception_to_dict). Of an error without this
        method the owner reads the name of its class."""
        return text.shortened(for_owner(self), FAULT)


def sentence(error: BaseException) -> str:
    """Return the text of an error, with the type of one not in nova_accel."""
    if not str(error):
        return repr(error)
    if isinstance(error, AcceleratorError):
        return str(error)
    return f'{type(error).__name__}: {error}'


def clause(error: BaseException) -> str:
    """Return sentence() as a part of a longer sentence."""
    return sentence(error).rstrip('.')


def for_owner(error: Exception) -> str:
    """Return what the owner of a server may read of an error: in the fault of
    the server, its metadata, or the answer of the API.

    Our sentences name what is the owner's, but for what they say after
    AcceleratorError.found, for paths of the host and for addresses of services
    inside the cloud. Texts of libvirt, of the kernel and of Python may name
    other servers as well. What is left out belongs into the log:
    for_owner_and_log() writes it.
    """
    if not isinstance(error, AcceleratorError):
        return _IN_THE_LOG
    said = (f'{error.found}: {_IN_THE_LOG}' if error.found
            else _RETRIED.sub('.', str(error)))
    return _PATH.sub('(a path of the host)', _ADDRESS.sub('', said))


def without_sentence(error: Exception) -> Exception | None:
    """Return the error for exc_info of a logger: of our own errors the log has
    a sentence, and no stack."""
    return None if isinstance(error, AcceleratorError) else error


def for_owner_and_log(error: Exception, log: Callable[..., None], about: str,
                      room: int | None = None) -> str:
    """Return for_owner(), and write the whole error to a log where that
    leaves something out.

    :param log: a method of a logger, of the level that is wanted.
    :param about: what the error is about, the beginning of the line.
    :param room: characters that the reader gets, where they are limited.
    """
    said = for_owner(error)
    if room is not None:
        said = text.shortened(said, room)
    if said != str(error):
        log('%s: %s', about, error)
    return said


class InvalidRequest(AcceleratorError):
    """A flavor, profile or extra spec that no host can serve."""

    elsewhere = False


class Contradiction(InvalidRequest):
    """Options of a flavor exclude each other, whatever it gets beside them."""


class InvalidProfile(InvalidRequest):
    """A device profile is unknown or malformed."""


class InvalidName(AcceleratorError):
    """A name that cannot become a trait or resource class."""

    elsewhere = False


class InvalidSimulation(AcceleratorError):
    """A simulated host's file that cannot be read."""


class BitstreamError(AcceleratorError):
    """An image that is missing, unreadable, or not as Glance says."""

    elsewhere = False


class ImageNotFound(BitstreamError):
    """An image that does not exist or that its reader may not see."""


class ImageRefused(BitstreamError):
    """Glance refused a request because of its user (401, 403)."""


class GlanceUnavailable(AcceleratorError):
    """Glance did not answer; the state of the image is unknown."""


class NoCredentials(GlanceUnavailable):
    """[service_user] of this host has no credentials."""


class ServiceUnavailable(AcceleratorError):
    """A service that a command asked did not answer, or refused to."""


class NotThere(AcceleratorError):
    """What the arguments of a command name does not exist."""


class PlacementUnavailable(AcceleratorError):
    """Placement did not answer; the allocation is unknown."""


class IncompatibleBitstream(AcceleratorError):
    """A good bitstream for another type of region."""


class ProgrammingFailed(AcceleratorError):
    """The card refused the bitstream, or does not work after it."""


class DeviceError(AcceleratorError):
    """A device could not be read or written."""


class NotCleared(DeviceError):
    """A device was reset after its server, and is not as it has to be: that
    is tried again after pauses that grow."""


class DeviceTimeout(DeviceError):
    """A hardware call did not return in time and may still be running."""


class DeviceBusy(DeviceTimeout):
    """A hardware call could not begin in time, as another one goes on."""


class LockTimeout(AcceleratorError):
    """Another operation held a lock for longer than its limit."""


class DeviceUnavailable(AcceleratorError):
    """The allocated device is gone, taken or quarantined on this host."""


class DeviceDetached(DeviceError):
    """A running server lost a device during reprogramming."""


class ClaimConflict(DeviceUnavailable):
    """The attach handle is held by another server."""


class AcceleratorsUnavailable(AcceleratorError):
    """The accelerators of this host could not be initialized."""


class NoClaimStore(AcceleratorsUnavailable):
    """nova-compute was not started on this host, or has another store."""


class ConfigurationError(AcceleratorError):
    """nova.conf has a value that cannot be used on this host."""


class UnusableDriver(ConfigurationError):
    """A driver that is installed and cannot be loaded: the others can."""


class IllegalTransition(AcceleratorError):
    """A change of state that the table of transitions does not have.

    It is a defect of nova_accel, never of the request.
    """
