# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The key of a compute host, which signs its hand-overs (store.chain).

It is an Ed25519 key (RFC 8032) in a file beside the claim store, PKCS #8 in
PEM. Only nova-compute's user can read it, and it never leaves the host.
"""

import base64
import os
import stat

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives import serialization

from nova_accel import exception
from nova_accel import files

#: suffix of the file of the key, after that of the claim store
SUFFIX = '.key'
#: suffix of a key that the operator replaces, which announces the next one
FORMER = '.key.old'


class Key:
    def __init__(self, private: ed25519.Ed25519PrivateKey):
        self._private = private
        #: the public half, 32 bytes in base64
        self.public = base64.b64encode(
            private.public_key().public_bytes_raw()).decode()

    def sign(self, message: bytes) -> str:
        """Return a signature in base64."""
        return base64.b64encode(self._private.sign(message)).decode()


def load(path: str) -> Key | None:
    """Return the key in a file, or None if the file is missing or empty.

    :raises AcceleratorsUnavailable: other users can read the file, or it does
        not contain a key.
    """
    try:
        with open(path, 'rb') as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            pem = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise exception.AcceleratorsUnavailable(
            f'The key {path}, which signs hand-overs, cannot be read '
            f'({error.strerror}): see that it belongs to the user of '
            f'nova-compute, and run commands as that user.') from error
    if not pem:
        # the power failed before create() had ended
        return None
    if mode & 0o077:
        raise exception.AcceleratorsUnavailable(
            f'The key {path}, which signs hand-overs, has mode {mode:04o}, and '
            f'others can read it and sign for this host: remove it and start '
            f'nova-compute, which creates another one; or set mode 0600 if no '
            f'other user has read it.')
    try:
        private = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm):
        private = None
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise exception.AcceleratorsUnavailable(
            f'The key {path}, which signs hand-overs, is not an Ed25519 key '
            f'in PEM: restore it, or remove it and start nova-compute, which '
            f'creates another one.')
    return Key(private)


def create(path: str) -> Key:
    """Write a new key into a file.

    :raises AcceleratorsUnavailable: the file cannot be written.
    """
    private = ed25519.Ed25519PrivateKey.generate()
    try:
        files.replace(path, private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption()).decode(), 0o600)
        # no signature is older than its key, even if the power fails
        for written in path, os.path.dirname(path):
            fd = os.open(written, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except OSError as error:
        raise exception.AcceleratorsUnavailable(
            f'The key {path}, which signs hand-overs, cannot be written '
            f'({error.strerror}): see that nova-compute may write its '
            f'directory.') from error
    return Key(private)


def is_signed(public: str, message: bytes, signature: str) -> bool:
    """Return whether a signature is valid for a key. Return False also if the
    key or the signature is not base64 as Key writes it."""
    try:
        key, found = (base64.b64decode(text, validate=True)
                      for text in (public, signature))
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(found, message)
    except (ValueError, exceptions.InvalidSignature):
        return False
    return [public, signature] == [
        base64.b64encode(part).decode() for part in (key, found)]
