# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Programming at run time: the owner of a server sets its metadata.

``accel<g>:bitstream_id=<image>`` asks for it (<g> is the group of the flavor;
it may be left out where one group only allows it), and ``accel<g>:status``
says what became of it: one word, the image, and after a colon why. Nova tells
a compute host nothing of metadata, so that they are read periodically.
"""

from collections.abc import Callable
import dataclasses
import re
import uuid

from oslo_log import log as logging

from nova_accel import exception
from nova_accel.host import limited
from nova_accel import model
from nova_accel import request

LOG = logging.getLogger(__name__)

#: Nova's limit for a value of metadata
_MAX = 255
_ASKS = re.compile(f'accel({request.GROUP}):bitstream_id')


class RuntimeProgramming:

    def __init__(self, accelerators, instances: Callable, context: Callable,
                 check: Callable, detach: Callable, attach: Callable):
        """
        :param instances: gives Nova's instances, fresh, of uuids.
        :param context: makes an admin context.
        :param check: (context, image id, project id); raises when servers of
            the project may not use the image.
        :param detach: (instance, handles) takes them out of the guest.
        :param attach: (instance, handles) puts them back.
        """
        self._accelerators = accelerators
        self._instances = instances
        self._context = context
        self._check = check
        self._detach = detach
        self._attach = attach
        self._background = limited.Background(self._logged_run)

    def start_run(self) -> None:
        """run() in the background, unless it still does."""
        self._background.start()

    def _logged_run(self):
        try:
            self.run()
        except Exception:
            LOG.exception('Metadata of servers could not be looked through '
                          'for bitstreams')

    def run(self) -> int:
        """Look through the servers now; how many regions were programmed."""
        held = {c.instance_uuid for c in self._accelerators.store.claims(
            role=model.Role.CURRENT)}
        done = 0
        for instance in self._instances(held) if held else ():
            if self._asked(instance):
                try:
                    done += self._run_one(instance.uuid)
                except Exception:
                    LOG.exception('Server %s asks for a bitstream, and could '
                                  'not be looked after', instance.uuid)
        return done

    def _run_one(self, instance_uuid):
        # operations that Nova began before wait for us, and those that begin
        # now show in task_state
        with self._accelerators.busy(instance_uuid):
            return sum(
                self._program(instance, group, image)
                for instance in self._instances([instance_uuid])
                if instance.vm_state == 'active' and not instance.task_state
                for group, image in self._asked(instance).items())

    def _asked(self, instance):
        """What is asked for and not yet answered: group -> image."""
        asked = {}
        for key, image in instance.metadata.items():
            found = _ASKS.fullmatch(key)
            if not found or not image:
                continue
            group = found[1]
            said = instance.metadata.get(f'accel{group}:status', '')
            word, _, about = said.partition(':')[0].partition(' ')
            if (about != _shown(image)
                    # of a process that is gone
                    or word == 'programming'
                    # the server moved, and its device came as in the flavor
                    or word == 'programmed'
                    and not self._carries(instance, group, image)):
                asked[group] = image
        return asked

    def _carries(self, instance, group, image):
        wanted = _request(instance, group, image)
        return all(c.bitstream_id == wanted.bitstream_id for c in
                   self._accelerators.store.claims(
                       instance.uuid, model.Role.CURRENT)
                   if c.group == wanted.group)

    def _program(self, instance, group, image):
        def say(word, reason=''):
            self._say(instance, f'accel{group}:status',
                      f'{word} {_shown(image)}{reason and f": {reason}"}')

        context = self._context()
        try:
            wanted = _request(instance, group, image)
            self._check(context, wanted.bitstream_id, instance.project_id)
            say('programming')
            self._accelerators.reprogram(
                context, instance.uuid, wanted,
                lambda handles: self._detach(instance, handles),
                lambda handles: self._attach(instance, handles))
        except exception.DeviceDetached as error:
            say('detached', error)
        except Exception as error:
            if not isinstance(error, exception.AcceleratorError):
                LOG.exception('Programming at run time failed')
            say('failed', error)
        else:
            say('programmed')
            return 1
        return 0

    @staticmethod
    def _say(instance, key, text):
        LOG.info('Server %s, %s: %s', instance.uuid, key, text)
        # what the owner has set meanwhile must stay
        instance.refresh()
        instance.metadata = {**instance.metadata, key: text[:_MAX]}
        instance.save()


def _shown(image):
    """The owner's text as a part of a status: short and without spaces."""
    return re.sub('[^0-9A-Za-z_.-]', '?', image)[:40]


def _request(instance, group, image):
    """What is asked for, as if the flavor said so.

    :raises InvalidRequest: not in this flavor, or no image.
    """
    free = {r.group: r for r in request.parse(instance.flavor.extra_specs)
            if r.runtime_programming}
    if not group and len(free) == 1:
        group, = free
    if group not in free:
        raise exception.InvalidRequest(
            f'accel{group}:bitstream_id has no group of the flavor that may '
            f'be programmed at run time, which are '
            f'{", ".join(map(repr, free)) or "none"}: the operator allows it '
            f'by accel<group>:{request.RUNTIME}=true.')
    try:
        bitstream_id = str(uuid.UUID(image))
    except ValueError:
        raise exception.InvalidRequest(
            f'accel{group}:bitstream_id is no id of an image: give a UUID.'
        ) from None
    return dataclasses.replace(
        free[group], function_id=None, function_name=None,
        bitstream_id=bitstream_id)
