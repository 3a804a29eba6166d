# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Programming at run time: the owner of a server sets its metadata.

``accel:bitstream_id=<image>`` (``accel<g>:bitstream_id`` where the flavor has
several such groups) asks for it, ``accel:status`` beside it says what became
of it. Only where the flavor says accel<g>:runtime_programming=true. Nova tells
a compute host nothing of metadata, so that they are read periodically, and
only those of servers that may.
"""

from collections.abc import Callable
import dataclasses
import time

from oslo_log import log as logging

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: Nova's limit for a value of metadata
_MAX = 255


class RuntimeProgramming:

    def __init__(self, accelerators, instances: Callable, lock: Callable,
                 context: Callable, check: Callable, detach: Callable,
                 attach: Callable):
        """
        :param instances: gives Nova's instances, fresh, of uuids.
        :param lock: context manager by instance uuid, which every operation
            of Nova on the instance takes.
        :param context: makes an admin context.
        :param check: (context, image id, project id); raises when servers of
            the project may not use the image.
        :param detach: (instance, handles) takes them out of the guest.
        :param attach: (instance, handles) puts them back.
        """
        self._accelerators = accelerators
        self._instances = instances
        self._lock = lock
        self._context = context
        self._check = check
        self._detach = detach
        self._attach = attach
        #: instance uuid -> whether its flavor allows it
        self._allowed: dict[str, bool] = {}
        self._ran_at = None
        self._running = None

    def run_if_due(self) -> None:
        if self._running and not self._running.done() or (
                self._ran_at is not None and time.monotonic() - self._ran_at
                < CONF.accel.runtime_programming_interval):
            return
        self._ran_at = time.monotonic()
        self._running = limited.start(self._logged_run)

    def _logged_run(self):
        try:
            self.run()
        except Exception:
            LOG.exception('Metadata of servers could not be looked through '
                          'for bitstreams')

    def run(self) -> int:
        """Look through the servers now; how many regions were programmed."""
        held = {c.instance_uuid for c in self._accelerators.store.claims()}
        self._allowed = {u: self._allowed.get(u, True) for u in held}
        candidates = [u for u in held if self._allowed[u]]
        done = 0
        for instance in self._instances(candidates) if candidates else ():
            wanted = _wanted(instance)
            self._allowed[instance.uuid] = wanted is not None
            if wanted:
                done += self._run_one(instance.uuid)
        return done

    def _run_one(self, instance_uuid):
        done = 0
        with self._lock(instance_uuid):
            # as it is now that nobody else works on it
            for instance in self._instances([instance_uuid]):
                if instance.vm_state != 'active' or instance.task_state:
                    continue
                for key, wanted in (_wanted(instance) or {}).items():
                    done += self._program(instance, key, wanted)
        return done

    def _program(self, instance, key, wanted):
        context = self._context()
        image = wanted.bitstream_id
        self._say(instance, key, f'programming {image}')
        try:
            self._check(context, image, instance.project_id)
            self._accelerators.reprogram(
                context, instance.uuid, wanted,
                lambda handles: self._detach(instance, handles),
                lambda handles: self._attach(instance, handles))
        except exception.DeviceDetached as error:
            self._say(instance, key, f'failed {image}, the device is detached '
                                     f'until a hard reboot: {error}')
        except Exception as error:
            if not isinstance(error, exception.AcceleratorError):
                LOG.exception('Programming at run time failed')
            self._say(instance, key, f'failed {image}, the function before '
                                     f'is kept: {error}')
        else:
            self._say(instance, key, f'programmed {image}')
            return 1
        return 0

    @staticmethod
    def _say(instance, key, text):
        LOG.info('Server %s, %s: %s', instance.uuid, key, text)
        instance.metadata = {**instance.metadata, key: text[:_MAX]}
        instance.save()


def _wanted(instance):
    """What is asked for and not yet answered: status key -> request.

    :returns: None where the flavor allows nothing at all.
    """
    free = [r for r in request.parse(instance.flavor.extra_specs)
            if r.runtime_programming]
    if not free:
        return None
    asked = {}
    for one in free:
        for group in {one.group} | ({''} if len(free) == 1 else set()):
            image = instance.metadata.get(f'accel{group}:bitstream_id', '')
            key = f'accel{group}:status'
            said = instance.metadata.get(key, '').split(', ')[0].split()
            # a status left at "programming" is of a process that is gone
            if image and (image not in said[1:]
                          or said[0] == 'programming'):
                asked[key] = dataclasses.replace(
                    one, function_id=None, function_name=None,
                    bitstream_id=image)
    return asked
