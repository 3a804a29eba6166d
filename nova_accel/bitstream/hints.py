# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What an operator wants to know of images before a server is built.

For nova-accel why, with the credentials of an administrator: nova-compute goes
by nothing of it.
"""

from collections.abc import Mapping
import tempfile
import typing
import uuid

from nova_accel.bitstream import gbs
from nova_accel.bitstream import glance
from nova_accel.bitstream import xclbin
from nova_accel import model
from nova_accel import request as accel_request
from nova_accel import text

#: vendor in the traits of a region -> what reads the files that it takes
_PARSERS = {'INTEL': gbs.parse, 'XILINX': xclbin.parse}


def header(client, image: glance.Image, vendor: str,
           ) -> model.Bitstream | None:
    """Read what the first MiB of an image says, without the rest of it.

    :param vendor: of the region, as in its traits.
    :returns: None where files for regions of this vendor are not known here.
    :raises BitstreamError: the file is not one that the region takes, or
        Glance refused the request.
    :raises IncompatibleBitstream: it is one for FPGAs of another vendor.
    :raises GlanceUnavailable: Glance did not answer.
    """
    if vendor not in _PARSERS:
        return None
    with tempfile.NamedTemporaryFile() as file:
        file.write(glance.head(client, image))
        # the parsers compare offsets with the size; what is missing is a hole
        if image.size:
            file.truncate(image.size)
        file.flush()
        return _PARSERS[vendor](file.name, str(image))


def not_counted(client, wanted: accel_request.AcceleratorRequest,
                project_id: str) -> str:
    """Explain why images that match a request cannot be used.

    :param client: sees the images of all projects.
    :returns: sentences for the operator; '' if images are found.
    """
    found: dict[str, Mapping[str, typing.Any]] = {}
    for choice in wanted.choices:
        for filters in _filters(choice):
            for hidden in 'false', 'true':
                found.update((r['id'], r) for r in glance.listed(
                    client, {**filters, 'os_hidden': hidden}))
    if not found and (wanted.function_id or wanted.function_name):
        return ('No image in Glance has it: upload one, and make it public or '
                'add its project to [accel] bitstream_owners.')
    said = [_why_not(entry, project_id) for entry in found.values()]
    return ' '.join(filter(None, said))


def _filters(choice):
    if choice.function_id:
        dashed = str(uuid.UUID(choice.function_id))
        for spelling in dashed, dashed.upper():
            yield {glance.FUNCTION_ID: spelling}
    elif choice.function_name:
        yield {glance.FUNCTION_NAME: choice.function_name}


def _why_not(entry, project_id) -> str:
    named = f'Image {entry["id"]} ({text.printable(entry.get("name"))})'
    if entry.get('os_hidden'):
        return (f'{named} has it and is hidden: openstack image set --unhidden '
                f'{entry["id"]}.')
    if (glance.origin(entry) != model.OPERATOR
            and entry.get('owner') != project_id):
        return (f'{named} has it and is {entry.get("visibility")}, of the '
                f'project {entry.get("owner")}: make it public, or add the '
                f'project to [accel] bitstream_owners.')
    return ''


def vendor_of(traits) -> str:
    """Return the vendor of a region, by its traits; '' where none is known."""
    return next((vendor for vendor in _PARSERS
                 if f'CUSTOM_FPGA_{vendor}' in traits), '')
