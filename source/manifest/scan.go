package manifest

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"nodeproxy/source/document"
	"nodeproxy/source/filewatch"
)

// stamp differs between two versions of a file.
type stamp struct {
	dev, inode   uint64
	size         int64
	mtime, ctime int64
}

// fileID identifies a file or directory among all that exist at the same time.
type fileID struct{ dev, inode uint64 }

func (s stamp) id() fileID { return fileID{s.dev, s.inode} }

func stampOf(info fs.FileInfo) stamp {
	st := stamp{size: info.Size(), mtime: info.ModTime().UnixNano()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		st.dev, st.inode, st.ctime = uint64(sys.Dev), sys.Ino, sys.Ctim.Nano()
	}
	return st
}

// scanned lists the files and directories at the path of the manifests.
type scanned struct {
	files  map[string]stamp
	dirs   map[string]bool   // with manifests
	ids    map[string]fileID // of dirs
	linked map[string]bool   // that symbolic links lead through or into
	above  string            // the nearest directory above the path that exists
	errs   map[string]error
	// dangling are the symbolic links to nothing.
	dangling map[string]bool
	exists   bool
	root     fileID          // of the path itself
	seen     map[fileID]bool // directories, so that cyclic links end
}

// scan lists the manifests. It follows symbolic links, which the volumes of ConfigMaps consist of.
func scan(root string) *scanned {
	s := &scanned{
		files: map[string]stamp{}, dirs: map[string]bool{}, linked: map[string]bool{}, errs: map[string]error{},
		ids: map[string]fileID{}, dangling: map[string]bool{}, seen: map[fileID]bool{},
	}
	s.above = filewatch.Existing(filepath.Dir(root))
	filewatch.Links(root, s.linked)
	info, err := os.Stat(root)
	switch {
	case err != nil:
		if !errors.Is(err, fs.ErrNotExist) {
			s.errs[root] = err
		}
		_, err := os.Lstat(root)
		s.dangling[root] = err == nil
		return s
	case info.IsDir():
		if s.directory(root, info); !s.dirs[root] {
			return s
		}
	default:
		s.file(root, info)
	}
	s.exists, s.root = true, stampOf(info).id()
	return s
}

// removed reports whether what was at a path below root was removed from a directory that can be read. If not, where is the
// path that can't be read.
func (s *scanned) removed(path, root string) (yes bool, where string) {
	for ; path != root; path = filepath.Dir(path) {
		if s.errs[path] != nil || s.dangling[path] {
			return false, path
		}
		if parent := filepath.Dir(path); s.dirs[parent] {
			return s.errs[parent] == nil, parent
		}
	}
	return false, root
}

// errDangling is the error of a symbolic link to nothing.
var errDangling = errors.New("it is a symbolic link that leads to nothing")

func (s *scanned) directory(dir string, info fs.FileInfo) {
	id := stampOf(info).id()
	if s.seen[id] {
		return
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) { // It was removed meanwhile.
		return
	}
	s.seen[id], s.dirs[dir], s.ids[dir] = true, true, id
	if err != nil {
		s.errs[dir] = err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), ".") || !e.IsDir() && e.Type()&fs.ModeSymlink == 0 && !accepted(path) {
			continue
		}
		if e.Type()&fs.ModeSymlink != 0 {
			filewatch.Links(path, s.linked)
		}
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // Removed meanwhile, or a link to nothing.
			if _, err := os.Lstat(path); err == nil {
				s.dangling[path] = true
				if accepted(path) {
					s.errs[path] = errDangling
				}
			}
		case err != nil:
			s.errs[path] = err
		case info.IsDir():
			s.directory(path, info)
		case accepted(path):
			s.file(path, info)
		}
	}
}

func (s *scanned) file(path string, info fs.FileInfo) {
	if !info.Mode().IsRegular() {
		s.errs[path] = errors.New("not a regular file")
		return
	}
	s.files[path] = stampOf(info)
}

// maxFile is the largest file that is read, in bytes.
const maxFile = 1 << 30

// readAll reads files, in order of name.
func readAll(paths []string) []*reading {
	slices.Sort(paths)
	out := make([]*reading, 0, len(paths))
	for _, path := range slices.Compact(paths) {
		r := &reading{path: path, text: &document.Text{Name: path}}
		r.text.Data, r.id, r.open, r.err = readFile(path)
		out = append(out, r)
	}
	return out
}

// readFile reads a file and returns its ID, and whether a program has it open for writing.
func readFile(path string) (data []byte, id fileID, open bool, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // A pipe must not block.
	if err != nil {
		return nil, id, false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, id, false, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, id, false, fmt.Errorf("no regular file of at most %d bytes", maxFile)
	}
	open = beingWritten(f)
	var content bytes.Buffer
	content.Grow(int(info.Size()) + bytes.MinRead)
	_, err = content.ReadFrom(f)
	return content.Bytes(), stampOf(info).id(), open, err
}

// beingWritten reports whether a program has the file open for writing: the kernel grants no lease on it then. On file systems
// without leases it returns false.
func beingWritten(f *os.File) bool {
	_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	}
	return errors.Is(err, unix.EAGAIN)
}

// accepted reports whether a file of this name holds manifests.
func accepted(name string) bool {
	base := filepath.Base(name)
	switch strings.ToLower(filepath.Ext(base)) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(base, ".")
	}
	return false
}
