package manifest

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"nodeproxy/source/filewatch"
)

// maxFile is the largest file that is read, in bytes.
const maxFile = 1 << 30

// tree lists the files and directories at the path of the manifests.
type tree struct {
	root   string
	info   fs.FileInfo         // of the root; nil if there is nothing
	files  map[string]*reading // not read yet
	dirs   map[string]bool     // with manifests
	linked map[string]bool     // that symbolic links lead through or into
	above  string              // the nearest directory above the root that exists
	errs   map[string]error    // of directories, and of links that may lead to one
}

var (
	errDangling = errors.New("can't be read: it is a symbolic link that leads to nothing")
	errNothing  = errors.New("there is nothing at this path")
)

// scan lists the manifests. It follows symbolic links, which the volumes of ConfigMaps consist of.
func scan(root string) *tree {
	t := &tree{root: root, files: map[string]*reading{}, dirs: map[string]bool{}, linked: map[string]bool{}, errs: map[string]error{}}
	t.above = filewatch.Existing(filepath.Dir(root))
	filewatch.Links(root, t.linked)
	info, err := os.Stat(root)
	switch {
	case err != nil:
		t.errs[root] = because(root, err)
		return t
	case info.IsDir():
		t.directory(root, nil)
	default:
		t.file(root, info, nil)
	}
	t.info = info
	return t
}

// directory adds a directory that is within others.
func (t *tree) directory(dir string, within []fs.FileInfo) {
	info, err := os.Stat(dir)
	for _, outer := range within {
		if err == nil && os.SameFile(info, outer) {
			return // A cycle of links.
		}
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) { // It was removed meanwhile.
		return
	}
	t.dirs[dir] = true
	if err != nil {
		t.errs[dir] = because(dir, err)
	}
	for _, e := range entries {
		path, isLink := filepath.Join(dir, e.Name()), e.Type()&fs.ModeSymlink != 0
		if strings.HasPrefix(e.Name(), ".") || !e.IsDir() && !isLink && !accepted(path) {
			continue
		}
		if isLink {
			filewatch.Links(path, t.linked)
		}
		inner, err := os.Stat(path)
		if err != nil {
			err = because(path, err)
		}
		switch {
		case errors.Is(err, errNothing): // It was removed meanwhile.
		case err == nil && inner.IsDir():
			t.directory(path, append(within[:len(within):len(within)], info))
		case accepted(path):
			t.file(path, inner, err)
		case err != nil:
			t.errs[path] = err
		}
	}
}

// because returns why there is nothing to be read at a path.
func because(path string, err error) error {
	if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("can't be read: %w", err)
	}
	if _, err := os.Lstat(path); err == nil {
		return errDangling
	}
	return errNothing
}

func (t *tree) file(path string, info fs.FileInfo, err error) {
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = errors.New("can't be read: not a regular file")
	case info.Size() > maxFile:
		err = fmt.Errorf("can't be read: it has more than %d bytes", maxFile)
	}
	t.files[path] = &reading{path: path, info: info, err: err}
}

// unreadable returns why directories can't be read.
func (t *tree) unreadable() map[string]error {
	out := maps.Clone(t.errs)
	maps.DeleteFunc(out, func(path string, _ error) bool { return !t.dirs[path] })
	return out
}

// lost returns why it can't be told whether a file was removed, and which path is at fault; nil if it was removed from a directory
// that can be read. filled is the root when there were files last.
func (t *tree) lost(path string, filled fs.FileInfo) (where string, err error) {
	if t.info != nil && filled != nil && len(t.files) == 0 && !os.SameFile(t.info, filled) && path != t.root {
		// A new one that is about to be filled, or the mount point of a file system.
		return t.root, errors.New("another directory, without manifests, is in the place of the one that had them")
	}
	for ; path != t.root; path = filepath.Dir(path) {
		if err := t.errs[path]; err != nil {
			return path, err
		}
		if dir := filepath.Dir(path); t.dirs[dir] {
			return dir, t.errs[dir]
		}
	}
	switch err := t.errs[path]; {
	case err == nil:
		return path, errors.New("this is not a directory any more")
	case errors.Is(err, errNothing) && filled != nil && !filled.IsDir() && t.above == filepath.Dir(path):
		return path, nil // The root was a file.
	default:
		return path, err
	}
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
