package manifest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"nodeproxy/proxier/source"
)

// stamp tells whether a file has changed.
type stamp struct {
	dev, inode   uint64
	size         int64
	mtime, ctime int64
}

func stampOf(info fs.FileInfo) stamp {
	st := stamp{size: info.Size(), mtime: info.ModTime().UnixNano()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		st.dev, st.inode, st.ctime = uint64(sys.Dev), sys.Ino, sys.Ctim.Nano()
	}
	return st
}

// scanned is what lies at the path of the manifests.
type scanned struct {
	files  map[string]stamp
	dirs   map[string]bool // those of manifests
	linked map[string]bool // those that symbolic links lead through or into
	above  string          // the nearest directory above the path that exists
	errs   map[string]error
	exists bool
	seen   map[[2]uint64]bool // directories, so that links in a circle end
}

// scan lists the manifests. It follows symbolic links, as the volumes of ConfigMaps are made of them.
func scan(root string) *scanned {
	s := &scanned{
		files: map[string]stamp{}, dirs: map[string]bool{}, linked: map[string]bool{}, errs: map[string]error{},
		seen: map[[2]uint64]bool{},
	}
	s.above = existing(filepath.Dir(root))
	s.follow(root)
	info, err := os.Stat(root)
	switch {
	case err != nil:
		if !errors.Is(err, fs.ErrNotExist) {
			s.errs[root] = err
		}
	case info.IsDir():
		s.exists = true
		s.directory(root, info)
	default:
		s.exists = true
		s.file(root, info)
	}
	return s
}

// existing returns the nearest directory at or above a path that exists.
func existing(dir string) string {
	for {
		if info, err := os.Stat(dir); err == nil && info.IsDir() || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

// follow notes the directories in which a change can make a symbolic link lead elsewhere.
func (s *scanned) follow(path string) {
	for range 16 {
		target, err := os.Readlink(path)
		if err != nil {
			return
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		// The target may lead through a link itself, as ..data of a ConfigMap volume.
		dir := filepath.Dir(target)
		s.linked[existing(dir)] = true
		if _, err := os.Readlink(dir); err == nil {
			s.linked[existing(filepath.Dir(dir))] = true
		}
		path = target
	}
}

func (s *scanned) directory(dir string, info fs.FileInfo) {
	st := stampOf(info)
	if s.seen[[2]uint64{st.dev, st.inode}] {
		return
	}
	s.seen[[2]uint64{st.dev, st.inode}] = true
	s.dirs[dir] = true
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.errs[dir] = err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), ".") || !e.IsDir() && e.Type()&fs.ModeSymlink == 0 && !accepted(path) {
			continue
		}
		if e.Type()&fs.ModeSymlink != 0 {
			s.follow(path)
		}
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // Gone meanwhile, or a link to nowhere.
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

// tellErrors reports what could not be listed, and takes back what was said of those in before.
func (s *scanned) tellErrors(before *scanned, report *reporter) {
	for path := range before.errs {
		if s.errs[path] == nil {
			report.tell("scan "+path, nil)
		}
	}
	for path, err := range s.errs {
		report.tell("scan "+path, []remark{{file: path, issue: issue{severity: source.Problem,
			detail: "can't be read: " + err.Error(), effect: "it is left out"}}})
	}
}

// readAll reads files, in order of name.
func readAll(paths []string) []*reading {
	slices.Sort(paths)
	out := make([]*reading, 0, len(paths))
	for _, path := range slices.Compact(paths) {
		r := &reading{path: path, text: &text{name: path}}
		r.text.data, r.err = readFile(path)
		out = append(out, r)
	}
	return out
}

func readFile(path string) (data []byte, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // A pipe in a file's place must not hold us up.
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("no regular file of at most %d bytes", maxFile)
	}
	data = make([]byte, 0, info.Size()+1)
	for {
		n, err := f.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
		if err == io.EOF {
			return data, nil
		}
		if err != nil {
			return nil, err
		}
		if len(data) == cap(data) {
			data = slices.Grow(data, 1<<16)
		}
	}
}
