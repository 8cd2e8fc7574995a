// Package oci makes OCI images, indexes and artifacts in layouts that are tar archives. The same input gives the same bytes.
package oci

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"strconv"
	"time"
)

// File is an entry of an archive.
type File struct {
	Header  tar.Header
	Content []byte
}

// Regular is a file that everyone may read.
func Regular(name string, content []byte) File {
	return File{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, content}
}

// Tar writes an archive of which all files belong to root, and none is newer than epoch or, as directories are, of the
// moment at which it was made.
func Tar(files []File, epoch time.Time) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range files {
		h := f.Header
		h.Size = int64(len(f.Content))
		if h.Typeflag == tar.TypeDir || h.ModTime.IsZero() || h.ModTime.After(epoch) {
			h.ModTime = epoch
		}
		if err := w.WriteHeader(&h); err != nil {
			return nil, fmt.Errorf("%s: %w", h.Name, err)
		}
		if _, err := w.Write(f.Content); err != nil {
			return nil, fmt.Errorf("%s: %w", h.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Gzip compresses, with neither a name nor a time in the header.
func Gzip(content []byte) []byte {
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, gzip.BestCompression) // which is a level
	_, _ = w.Write(content)                                 // A buffer takes everything.
	_ = w.Close()
	return out.Bytes()
}

// Epoch is the time that everything gets: SOURCE_DATE_EPOCH of the environment, in seconds.
func Epoch() (time.Time, error) {
	seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH, the time of what is made, in seconds: %w", err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}
