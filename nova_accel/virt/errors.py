# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Translate errors of nova_accel into errors of Nova, which decide whether
another host is tried, and which fault users read."""

from collections.abc import Callable
import contextlib
import functools
import inspect
import logging as python_logging
import os

from nova.compute import task_states
from nova import exception as nova_exception
from nova.virt.libvirt import driver as libvirt_driver
from oslo_utils import excutils

from nova_accel import conf
from nova_accel import exception
from nova_accel import log as logging
from nova_accel import wrapping

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: does not wait for threads; tests replace it
end_process = os._exit


@contextlib.contextmanager
def start_refused():
    """Context manager: end nova-compute with one line in the log if nova_accel
    cannot start.

    The process ends at once, with status 1. After an exception, Nova would log
    a traceback. Then the process would wait for its threads (native threads),
    or end with status 0, which systemd takes for success (eventlet).
    """
    refused = None
    try:
        yield
    except exception.AcceleratorError as error:
        refused = str(error)
    # outside of the handler, because oslo.log would add the exception to the
    # line
    if refused is not None:
        LOG.critical('nova-compute does not start: %s', refused)
        python_logging.shutdown()
        end_process(1)


def log_move_refused(error: Exception) -> None:
    """Log why Placement refuses to move allocations. Nova ends nova-compute
    after this error.

    :param error: nova.exception.ReshapeFailed
    """
    LOG.critical(
        'Allocations of servers must move to the providers that show their '
        'devices now, and Placement refused (%s): nova-compute does not start '
        'before you undo the change of [accel] pools, device_sets or '
        'resource_classes, or correct what Placement names, and start it '
        'again.', ' '.join(str(error).split())[:600].rstrip('.'))


def warn_of_simulation() -> None:
    """Warn at the start if Placement shows devices of a simulated host."""
    if CONF.accel.simulated_host:
        LOG.warning('The devices of this host are simulated ([accel] '
                    'simulated_host = %s): they are in Placement and can be '
                    'programmed, but libvirt refuses to give them to servers',
                    CONF.accel.simulated_host)


@contextlib.contextmanager
def nothing_changed():
    """Context manager for operations that fail only before they change
    anything. Translate errors of nova_accel: Nova then keeps the state of the
    server."""
    try:
        yield
    except exception.AcceleratorError as error:
        raise nova_exception.InstanceFaultRollback(error) from error


class BuildRefused(nova_exception.BuildAbortException):
    """Ends a build. The fault of the server has the sentence of nova_accel
    without a sentence of Nova before it, because Nova cuts off long faults."""

    msg_fmt = '%(reason)s'


class Builds:
    """The builds that this nova-compute works on.

    Nova's ComputeManager has the context of a build, and knows whether the
    build may be retried on another host. It passes neither to the driver.
    """

    def __init__(self):
        #: uuid of a server -> context of the request that builds it
        self._contexts = {}
        #: servers for which the scheduler gave no other host
        self._last_hosts = set()

    def watch(self, manager, ended: Callable[[str], None]) -> None:
        """Listen to the builds of a nova.compute.manager.ComputeManager.

        :param ended: called with the uuid of a server whose build has ended,
            successfully or not.
        """
        if not hasattr(manager, '_do_build_and_run_instance'):
            LOG.warning('This release of Nova does not show which build is '
                        'on its last host, nor for whom a build is: bitstreams '
                        'are fetched later, and the reason why a build failed '
                        'on its last host is only in the log of nova-compute')
            return
        wrapping.wrap(manager, '_do_build_and_run_instance', functools.partial(
            self._build, ended,
            inspect.signature(manager._do_build_and_run_instance)))

    def _build(self, ended, parameters, build, *args, **kwargs):
        try:
            given = parameters.bind(*args, **kwargs).arguments
        except TypeError:
            # an unknown release of Nova; it raises what it must
            return build(*args, **kwargs)
        uuid = given['instance'].uuid
        self._contexts[uuid] = given.get('context')
        if given.get('host_list') == []:
            self._last_hosts.add(uuid)
        try:
            found = build(*args, **kwargs)
        except Exception:
            with excutils.save_and_reraise_exception():
                ended(uuid)
        finally:
            self._contexts.pop(uuid, None)
            self._last_hosts.discard(uuid)
        ended(uuid)
        return found

    def context_of(self, instance):
        """Return the context of the request that builds a server, or None.

        The current context of the thread has no token after a notification
        (oslo_messaging.notify.notifier).
        """
        return self._contexts.get(instance.uuid)

    @contextlib.contextmanager
    def translated(self, instance, has_accelerators=lambda: False):
        """Translate errors of nova_accel that the context raises. Nova then
        retries the build if another host may succeed. Otherwise it aborts the
        build with the error as the fault. On the last host, errors of libvirt
        are translated, too.

        :param has_accelerators: function that returns whether the server has
            accelerators.
        """
        try:
            yield
        except exception.AcceleratorError as error:
            # a rebuild must not be retried: the server would be ACTIVE without
            # a guest
            if (error.elsewhere and instance.uuid not in self._last_hosts
                    and instance.task_state == task_states.SPAWNING):
                raise nova_exception.ComputeResourcesUnavailable(
                    reason=fault(error, instance)) from error
            raise BuildRefused(instance_uuid=instance.uuid,
                               reason=fault(error, instance)) from error
        except Exception as error:
            if not (instance.uuid in self._last_hosts
                    and is_of_libvirt(error) and has_accelerators()):
                raise
            # libvirt names other domains of the host, and paths
            LOG.error('libvirt refuses to start server %s with its '
                      'accelerators: %s', instance.uuid, error)
            said = exception.for_owner(error)
            if CONF.accel.simulated_host:
                raise BuildRefused(instance_uuid=instance.uuid, reason=(
                    f'Server {instance.uuid} cannot start with devices of a '
                    f'simulated host, which libvirt refuses: remove '
                    f'[accel] simulated_host on that host.')) from error
            raise BuildRefused(instance_uuid=instance.uuid, reason=(
                f'Server {instance.uuid} cannot start with its accelerators, '
                f'because libvirt refuses: {said}')) from error


def fault(error, instance) -> str:
    """Return the part of an error that the owner of a server may read. The log
    has the whole error."""
    room = exception.FAULT
    if instance.task_state == task_states.RESCUING:
        # Nova begins that fault with words of its own
        room -= len(str(nova_exception.InstanceNotRescuable(
            instance_id=instance.uuid, reason='Driver Error: ')))
    return exception.for_owner_and_log(
        error, LOG.error, f'Server {instance.uuid}', room)


def is_of_libvirt(error) -> bool:
    # Nova imports libvirt late, and may have none
    kind = getattr(libvirt_driver.libvirt, 'libvirtError', None)
    return isinstance(kind, type) and isinstance(error, kind)
