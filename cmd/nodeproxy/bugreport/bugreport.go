// Package bugreport makes the archive of a bug report: it leaves out secrets, and hashes names and addresses if that is wanted.
package bugreport

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"regexp"
	"strings"
	"time"
)

// File is a file of a bug report.
type File struct{ Name, Text string }

var (
	// secrets match what must not leave the node, wherever it may be: tokens, and the content of certificates and keys.
	// Of a certificate or key whose end is cut off, everything that may be base64.
	secrets = regexp.MustCompile(`(?s)-----BEGIN [A-Z ]+-----(?:.*?-----END [A-Z ]+-----|[A-Za-z0-9+/=\s\\]*)|` +
		`(?i:bearer +|authorization\W{1,6}basic +)[-._~+/A-Za-z0-9]+=*|eyJ[-_A-Za-z0-9]{10,}\.[-_A-Za-z0-9]+\.[-_A-Za-z0-9]*`)
	// logins match what stands in a URL before the host: a name and a password, in which any character may be, or a token.
	logins = regexp.MustCompile(`://[^\s"']+@`)
	// secretKeys match a key whose value is secret by its name, as group 1, what is between them, and the value.
	secretKeys = regexp.MustCompile(`(?i)([\w./-]*(?:token|passw(?:or)?d|passphrase|secret|(?:api|access|private)[-_]?key|key-data))(\\?["']? *[=:] *)(\\"[^"]*\\"|"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"',;]+)`)
	// objectName matches the namespace and name of an object, behind which a colon and a port may follow. A key with a prefix has a
	// domain in place of the namespace.
	objectName = regexp.MustCompile(`^[a-z0-9-]+/[a-z0-9-]+$`)
)

// Redact replaces what is secret in a text.
func Redact(text string) string {
	text = secrets.ReplaceAllString(text, redacted)
	text = logins.ReplaceAllString(text, "://"+redacted+"@")
	return secretKeys.ReplaceAllStringFunc(text, func(match string) string {
		part := secretKeys.FindStringSubmatch(match)
		key, between, value := part[1], part[2], part[3]
		if objectName.MatchString(key) && strings.HasPrefix(between, ":") {
			return match // Service shop/vault-token:http
		}
		quote := ""
		for _, q := range []string{`\"`, `"`, `'`} {
			if strings.HasPrefix(value, q) {
				quote = q
				break
			}
		}
		return key + between + quote + redacted + quote
	})
}

// redacted is in place of a secret.
const redacted = "REDACTED"

// Create makes an archive that only its owner can read. The file must not exist.
func Create(file string, report []File, now time.Time) (err error) {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			_ = os.Remove(file) // It is cut off.
		}
	}()
	return Write(f, report, now)
}

// Write writes a compressed archive of files that were written at one time.
func Write(w io.Writer, report []File, now time.Time) error {
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	for _, r := range report {
		if err := t.WriteHeader(&tar.Header{Name: "nodeproxy-support/" + r.Name, Mode: 0o600, Size: int64(len(r.Text)), ModTime: now}); err != nil {
			return err
		}
		if _, err := io.WriteString(t, r.Text); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), z.Close())
}
