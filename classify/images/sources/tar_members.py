"""The members of a tar that nobody has checked, read within limits."""

from __future__ import annotations

import pathlib
import tarfile
from collections.abc import Iterator
from typing import NoReturn

from deepspeed_trial.input_files import parsed

BLOCK = 512  # bytes of a member's header
_MOST_OF_A_HEADER = 2**14  # bytes of a pax header or a long name
_MOST_HEADERS = 5  # before one member
_MOST_GLOBAL = 100  # keys of the pax headers for all members
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class _Tar(tarfile.TarFile):
    """A tar that counts the extended headers before a member."""

    headers = 0


class _Member(tarfile.TarInfo):
    """A member whose headers are few and small, and which has no holes."""

    def _proc_member(self, tar: _Tar) -> tarfile.TarInfo:
        """Check a header before tarfile reads the bytes that it announces."""
        is_extended = self.type in _EXTENDED
        tar.headers = tar.headers + 1 if is_extended else 0
        if self.size < 0 or (is_extended and self.size > _MOST_OF_A_HEADER):
            raise tarfile.ReadError(f"a header announces {self.size:,} bytes")
        if tar.headers > _MOST_HEADERS or len(tar.pax_headers) > _MOST_GLOBAL:
            raise tarfile.ReadError("too many headers before a member")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _refuse(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a member is sparse; write it without holes")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse


def members(file: pathlib.Path, name: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first byte and the size of each regular file in a tar, in their order.

    Args:
        file: the tar.
        name: of the tar, for error lines.

    Raises:
        InvalidInput: if it is no whole tar.
    """
    with parsed(f"{name}: not a readable tar", "is it whole? write or fetch it again"):
        end, whole = -1, file.stat().st_size
        with _Tar.open(file, "r:", tarinfo=_Member) as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or it keeps them all
                is_inside = 0 <= member.size <= whole - member.offset_data
                if member.isfile() and not is_inside:
                    raise tarfile.ReadError("unexpected end of data")
                if tar.offset <= end:
                    raise tarfile.ReadError("its members overlap")
                end = tar.offset
                if member.isfile():
                    yield member.name, member.offset_data, member.size
        with open(file, "rb") as opened:
            opened.seek(tar.offset)
            if opened.read(BLOCK).strip(b"\0"):  # where tarfile ends without a word
                raise tarfile.ReadError(f"no header at byte {tar.offset:,}")
