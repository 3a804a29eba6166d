# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Errors. Each message is one sentence: asked, found, what to do."""

from collections.abc import Callable
import re

from nova_accel import text

#: Nova cuts a fault (compute_utils.exception_to_dict, Nova 31 to 34) and a
#: value of metadata off after so many characters
FAULT = 255
#: an absolute path that is not part of a URL
_PATH = re.compile(r"""(?<![\w:/])/[^\s'"`,;()]*[^\s'"`,;().:]""")
#: address of a service in an error of nova_accel
_ADDRESS = re.compile(r' at https?://\S+')
#: Nova's reaction, which owners need not know; untrue on the last host
_RETRIED = re.compile(r': the build is retried on another host\.$')
#: built-in errors of code that reads a body or file as JSON, if it is the HTML
#: of a proxy, is truncated, or has another structure
MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_IN_THE_LOG = 'the reason is in the log of nova-compute, ask the operator.'


class AcceleratorError(Exception):
    """Base of all errors of nova_accel."""

    #: whether Nova retries the build on another host; otherwise it aborts it
    elsewhere = True

    def __init__(self, *args: object, found: str = ''):
        """:param args: the sentence, for the operator.
        :param found: the finding as the owner of a server may read it, a
            clause without a full stop. It replaces the sentence, for example
            if the sentence has a reason of a hold or a message of the kernel,
            which only operators may read. If found is '', the owner reads the
            sentence.
        """
        super().__init__(*(text.one_line(arg) if isinstance(arg, str)
                           else arg for arg in args))
        self.found = text.one_line(found)

    def format_message(self) -> str:
        """Return for_owner() of this error. Nova calls this for the fault of a
        server (nova.compute.utils.exception_to_dict). Otherwise the owner
        would read only the name of the class."""
        return text.shortened(for_owner(self), FAULT)


def sentence(error: BaseException) -> str:
    """Return the text of an error. If it is not an error of nova_accel, put
    its type before the text."""
    if not str(error):
        return repr(error)
    if isinstance(error, AcceleratorError):
        return str(error)
    return f'{type(error).__name__}: {error}'


def clause(error: BaseException) -> str:
    """Return sentence() without full stop, for use in another sentence."""
    return sentence(error).rstrip('.')


def for_owner(error: Exception) -> str:
    """Return the text about an error that the owner of a server may read: in
    the fault or the metadata of the server, or in a response of the API.

    An error of nova_accel names only resources of the owner, apart from three
    things that are replaced: paths of the host, addresses of services inside
    the cloud, and sentences that have AcceleratorError.found. Other errors, of
    libvirt, the kernel or Python, may name other servers. Hence the owner only
    learns that the log has the reason; see for_owner_and_log().
    """
    if not isinstance(error, AcceleratorError):
        return _IN_THE_LOG
    said = (f'{error.found}: {_IN_THE_LOG}' if error.found
            else _RETRIED.sub('.', str(error)))
    return _PATH.sub('(a path of the host)', _ADDRESS.sub('', said))


def without_sentence(error: Exception) -> Exception | None:
    """Return the value of exc_info to log an error. It is None for errors of
    nova_accel, because their sentence suffices without a stack trace."""
    return None if isinstance(error, AcceleratorError) else error


def for_owner_and_log(error: Exception, log: Callable[..., None], about: str,
                      room: int | None = None) -> str:
    """Return for_owner() of an error. If this omits a part of the error, log
    the whole error.

    :param log: method of a logger for the level.
    :param about: subject of the error, which begins the log line.
    :param room: maximum number of characters for the owner.
    """
    said = for_owner(error)
    if room is not None:
        said = text.shortened(said, room)
    if said != str(error):
        log('%s: %s', about, error)
    return said


class InvalidRequest(AcceleratorError):
    """A flavor, profile or extra spec cannot be satisfied by any host."""

    elsewhere = False


class Contradiction(InvalidRequest):
    """Options of a flavor exclude each other in any combination."""


class InvalidProfile(InvalidRequest):
    """A device profile is unknown or malformed."""


class InvalidName(AcceleratorError):
    """A name cannot become a trait or a resource class."""

    elsewhere = False


class InvalidSimulation(AcceleratorError):
    """The file of a simulated host cannot be used."""


class BitstreamError(AcceleratorError):
    """An image is missing or unreadable, or does not match Glance's entry."""

    elsewhere = False


class ImageNotFound(BitstreamError):
    """An image does not exist, or the requester may not see it."""


class ImageRefused(BitstreamError):
    """Glance refused a request, because its user lacks a right (401, 403)."""


class GlanceUnavailable(AcceleratorError):
    """Glance did not answer; the state of the image is unknown."""


class NoCredentials(GlanceUnavailable):
    """[service_user] of this host has no credentials."""


class ServiceUnavailable(AcceleratorError):
    """A service that a command called did not answer, or refused to."""


class NotThere(AcceleratorError):
    """An argument of a command, or a request to Nova, names an object that
    does not exist."""


class PlacementUnavailable(AcceleratorError):
    """Placement did not answer; the allocation is unknown."""


class IncompatibleBitstream(AcceleratorError):
    """A bitstream is valid, but is for another type of region."""


class ProgrammingFailed(AcceleratorError):
    """The card refused the bitstream, or does not work after programming."""


class DeviceError(AcceleratorError):
    """A device could not be read or written."""


class NotCleared(DeviceError):
    """A device was reset after its server, but is not clean. The driver tries
    again, each time after a longer pause."""


class DeviceTimeout(DeviceError):
    """A hardware call did not return in time and may still be running."""


class DeviceBusy(DeviceTimeout):
    """A hardware call could not begin in time, because another one runs."""


class LockTimeout(AcceleratorError):
    """Another operation held a lock for longer than its limit."""


class DeviceUnavailable(AcceleratorError):
    """The allocated device is missing, in use or withheld on this host."""


class DeviceDetached(DeviceError):
    """A running server lost a device during reprogramming."""


class ClaimConflict(DeviceUnavailable):
    """Another server has the attach handle."""


class AcceleratorsUnavailable(AcceleratorError):
    """The accelerators of this host could not be initialized."""


class NoClaimStore(AcceleratorsUnavailable):
    """nova-compute has not run on this host, or uses another store."""


class ConfigurationError(AcceleratorError):
    """nova.conf has a value that is not usable on this host."""


class UnusableDriver(ConfigurationError):
    """An installed driver cannot be loaded. Other drivers are used."""


class IllegalTransition(AcceleratorError):
    """A change of state is not in the table of transitions.

    This is a defect of nova_accel, and never a fault of the request.
    """
