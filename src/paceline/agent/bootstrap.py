"""Runs first on a node: finds or receives the agent's code, then becomes the agent.

Sent over standard input to ``python -c``; it must parse on any Python 3, to report one that is too
old. Cached code runs only if nobody else can write to it and it has the hash the launcher names.
"""

# ruff: noqa
# fmt: off
import os, stat, sys

COMPILED = "__pycache__"

def write_status(word):
    os.write(1, b"\xf5PLboot " + word.encode() + b"\n")

def read_exactly(count):
    data = b""
    while len(data) < count:
        chunk = os.read(0, count - len(data))
        if not chunk:
            sys.exit(1)
        data += chunk
    return data

def is_private_group(number):
    """Whether a group has this user only, as many systems make for each user (umask 002)."""
    import grp, pwd
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    if group.gr_name != user.pw_name or not set(group.gr_mem) <= {user.pw_name}:
        return False
    return all(other.pw_uid == os.getuid() for other in pwd.getpwall() if other.pw_gid == number)

def is_trusted_path(path, sticky=False):
    """Whether nobody else can change what is at a resolved path, up to the root, as sshd checks.

    The root may have any owner: where root has no number (containers) everything is theirs.
    """
    while True:
        status, parent = os.lstat(path), os.path.dirname(path)
        writable = status.st_mode & 0o022
        if writable == 0o020 and is_private_group(status.st_gid):
            writable = 0
        if writable and not (sticky and status.st_mode & 0o1000):
            return False
        if parent == path:
            return True
        if status.st_uid not in (0, os.getuid()):
            return False
        path, sticky = parent, True

def place(digest):
    """Returns the folder of that content in the cache; "" if other users could change it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parent = os.path.realpath(os.path.join(base, "paceline", "agent"))
    try:
        if not os.path.isdir(parent):
            existing = parent
            while not os.path.lexists(existing):
                existing = os.path.dirname(existing)
            if not is_trusted_path(existing, True):
                return ""
            umask = os.umask(0o077)
            try:
                os.makedirs(parent, exist_ok=True)  # another agent may share the disk
            finally:
                os.umask(umask)
        return os.path.join(parent, digest) if is_trusted_path(parent) else ""
    except OSError:
        return ""

def content(folder):
    """Hashes the folder's files as the launcher does; "" if it holds anything unexpected."""
    import hashlib, marshal
    contents = {}
    for parent, folders, files in os.walk(folder):
        if not all(is_own(os.path.join(parent, name), stat.S_ISDIR) for name in folders):
            return ""
        for name in files:
            path = os.path.join(parent, name)
            if os.path.basename(parent) != COMPILED:
                if not (path.endswith(".py") and is_own(path, stat.S_ISREG)):
                    return ""
                contents[os.path.relpath(path, folder)] = read(path)
            elif sys.implementation.cache_tag in name and name.endswith(".pyc"):
                # a power cut may have truncated it; one that is being written ends otherwise
                marshal.loads(read(path)[16:])
    digest = hashlib.sha256()
    for name, data in sorted(contents.items()):
        digest.update(("%s\0%d\0" % (name, len(data))).encode() + data)
    return digest.hexdigest()

def is_own(path, is_kind):
    """Whether the path belongs to this user and is itself of that kind, not a link to it."""
    status = os.lstat(path)
    return status.st_uid == os.getuid() and is_kind(status.st_mode)

def read(path):
    with open(path, "rb") as file:
        return file.read()

def is_valid(folder, digest):
    """Whether the folder has the content, and only this user can read it."""
    try:
        closed = is_own(folder, stat.S_ISDIR) and not os.lstat(folder).st_mode & 0o077
        return closed and content(folder) == digest
    except Exception:
        return False

def unpack(folder, archive, digest):
    """Unpacks the content into its folder, unless another agent was faster.

    Agents of several hosts may share the disk, with equal process numbers.
    """
    import fcntl, io, shutil, zipfile
    token = "".join("%02x" % byte for byte in bytearray(os.urandom(8)))
    unpacked, replaced = folder + ".new" + token, folder + ".old" + token
    parent = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_CLOEXEC)
    umask = os.umask(0o077)
    try:
        os.makedirs(unpacked, 0o700)
        zipfile.ZipFile(io.BytesIO(archive)).extractall(unpacked)
        try:  # or an agent could move a folder that another has just replaced and runs from
            fcntl.flock(parent, fcntl.LOCK_EX)
        except OSError:
            pass  # not on every network disk
        if os.path.lexists(folder) and not is_valid(folder, digest):
            os.rename(folder, replaced)
            if is_valid(replaced, digest):  # it was put in order meanwhile
                os.rename(replaced, folder)
        if not os.path.lexists(folder):
            os.rename(unpacked, folder)
    finally:
        os.close(parent)
        os.umask(umask)
        shutil.rmtree(unpacked, True)
        if os.path.lexists(replaced):
            is_folder = os.path.isdir(replaced) and not os.path.islink(replaced)
            shutil.rmtree(replaced, True) if is_folder else os.unlink(replaced)

def boot(digest, chosen):
    try:
        start(digest, chosen)
    except ImportError as problem:
        names = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT")
        settings = ["%s=%s" % (name, os.environ[name]) for name in names if name in os.environ]
        text = "paceline-boot: broken Python: %s\n%s\n" % (problem, " ".join(settings))
        os.write(2, text.encode("utf-8", "replace"))
        sys.exit(1)

def start(digest, chosen):
    if sys.version_info < (3, 9):
        write_status("old %d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable))
        sys.exit(1)
    if not sys.platform.startswith("linux"):
        write_status("system " + sys.platform)
        sys.exit(1)
    folder = place(digest)
    extra = []
    if folder and is_valid(folder, digest):
        write_status("have")
    else:
        write_status("need")
        archive = read_exactly(int(read_exactly(10)))
        try:
            if folder:
                try:
                    unpack(folder, archive, digest)
                except OSError:
                    folder = folder if is_valid(folder, digest) else ""
            if not folder:
                import tempfile
                folder = os.path.join(tempfile.mkdtemp(prefix="paceline-agent-"), digest)
                unpack(folder, archive, digest)
                extra = ["--temporary"]
        except OSError as problem:
            os.write(2, ("paceline-boot: no room: %s\n" % problem).encode("utf-8", "replace"))
            sys.exit(1)
    sys.path.insert(0, folder)
    from paceline_agent.entry import main
    sys.exit(main(["serve", chosen] + extra))
