"""Moves a complete file from one folder into another, without following links in either."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.agent.files.snapshot import BLOCK_BYTES


def set_mtime(root: Path, path: str, mtime_us: int) -> None:
    fd = safe_paths.open_file(str(root), path, os.O_RDONLY)
    try:
        os.utime(fd, ns=(mtime_us * 1000, mtime_us * 1000))
    finally:
        os.close(fd)


def move_file(source: Path, path: str, target: Path, to: str, *, replace: bool) -> None:
    """Moves a file to another folder; FileExistsError if that has one and may not be replaced."""
    parent, _, name = path.rpartition("/")
    to_parent, _, to_name = to.rpartition("/")
    source_fd = safe_paths.open_folder(str(source), parent)
    try:
        target_fd = safe_paths.open_folder(str(target), to_parent)
        try:
            try:
                _rename(source_fd, name, target_fd, to_name, replace=replace)
            except FileExistsError:
                raise
            except OSError:  # on another disk, or one without hard links
                part = f".{to_name[:200]}.{secrets.token_hex(4)}"
                try:
                    _copy(source_fd, name, target_fd, part)
                    if not replace and _exists(target_fd, to_name):
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), to) from None
                    os.replace(part, to_name, src_dir_fd=target_fd, dst_dir_fd=target_fd)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(part, dir_fd=target_fd)
                    raise
                os.unlink(name, dir_fd=source_fd)
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)


def _rename(source_fd: int, name: str, target_fd: int, to: str, *, replace: bool) -> None:
    if replace:
        os.replace(name, to, src_dir_fd=source_fd, dst_dir_fd=target_fd)
        return
    # a link, unlike a rename, never replaces a file that has just been made
    os.link(name, to, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
    os.unlink(name, dir_fd=source_fd)


def _exists(folder_fd: int, name: str) -> bool:
    try:
        os.lstat(name, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    return True


def _copy(source_fd: int, name: str, target_fd: int, to: str) -> None:
    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source_fd)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        target = os.open(to, flags, 0o666, dir_fd=target_fd)
        try:
            while data := os.read(source, BLOCK_BYTES):
                safe_paths.write_fully(target, data)
            status = os.fstat(source)
            os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))
            os.fsync(target)
        finally:
            os.close(target)
    finally:
        os.close(source)
