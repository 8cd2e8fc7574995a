package main

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"os"
	"regexp"
	"strings"
)

// anonymizer replaces names and addresses by hashes: the same by the same, for as long as it lives. Without its key, which nothing keeps,
// nobody can find out by trial what a hash stands for.
type anonymizer struct {
	key   []byte
	names map[string]bool
}

func newAnonymizer() *anonymizer {
	a := &anonymizer{key: make([]byte, 32), names: map[string]bool{}}
	_, _ = rand.Read(a.key) // It never fails.
	return a
}

// wellKnown are names that every cluster has.
var wellKnown = map[string]bool{
	"": true, "default": true, "kube-system": true, "kube-public": true, "kubernetes": true, "kube-dns": true, "localhost": true,
}

// learn adds names: those of namespaces, objects and hosts.
func (a *anonymizer) learn(names ...string) {
	for _, n := range names {
		if !wellKnown[n] {
			a.names[n] = true
		}
	}
}

var (
	// objectIn matches the namespace and name of an object in a text, such as that of a finding, a rule's comment or the log.
	objectIn = regexp.MustCompile(`(?:^|[\s"'=({\[])([a-z0-9][a-z0-9-]*)/([a-z0-9][a-z0-9.-]*[a-z0-9]|[a-z0-9])(?:[\s"':;,)}\]]|$)`)
	// hostIn matches the host of a URL.
	hostIn = regexp.MustCompile(`://(?:[^/\s@"']+@)?([A-Za-z0-9.-]+)`)
	// keyIn matches the value of a key of JSON that is a name.
	keyIn = regexp.MustCompile(`"(?:namespace|name|node|nodeName|pod|hostnameOverride)": *"([^"]+)"`)
	// podIn matches the name of a Pod or of a node where a text speaks of one.
	podIn = regexp.MustCompile(`(?:Pods?|[Nn]odes?|EndpointSlice) "?([a-z0-9][a-z0-9.-]*[a-z0-9])\b`)
)

// learnFrom adds the names in a text.
func (a *anonymizer) learnFrom(text string) {
	for _, m := range objectIn.FindAllStringSubmatch(text, -1) {
		a.learn(m[1], m[2])
	}
	for _, re := range []*regexp.Regexp{hostIn, keyIn, podIn} {
		for _, m := range re.FindAllStringSubmatch(text, -1) {
			a.learn(m[1])
		}
	}
}

// hashed is the hash of a text, of so many letters and digits.
func (a *anonymizer) hashed(text string, size int) string {
	h := hmac.New(sha256.New, a.key)
	h.Write([]byte(text))
	return base32.StdEncoding.EncodeToString(h.Sum(nil))[:size]
}

var (
	// chains match the chains whose names are hashes of the names of Services, which could be found out by trial.
	chains = regexp.MustCompile(`\b(KUBE-[A-Z]+)-[A-Z2-7]{16}\b`)
	// addresses match what may be an address, with or without a port.
	addresses = regexp.MustCompile(`[0-9A-Fa-f]*[:.][0-9A-Fa-f:.]*`)
	// words match what may be a name, or several with dots between them.
	words = regexp.MustCompile(`[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?`)
)

// apply replaces the names and addresses in a text.
func (a *anonymizer) apply(text string) string {
	text = chains.ReplaceAllStringFunc(text, func(chain string) string {
		i := strings.LastIndexByte(chain, '-')
		return chain[:i+1] + a.hashed(chain, 16)
	})
	var out strings.Builder
	last := 0
	for _, at := range words.FindAllStringIndex(text, -1) {
		if strings.HasPrefix(text[at[1]:], `":`) || strings.HasPrefix(text[at[1]:], `" :`) {
			continue // a key of JSON
		}
		out.WriteString(text[last:at[0]])
		out.WriteString(a.word(text[at[0]:at[1]]))
		last = at[1]
	}
	out.WriteString(text[last:])
	return addresses.ReplaceAllStringFunc(out.String(), a.address)
}

// word replaces a name, or those of its parts between dots that are names.
func (a *anonymizer) word(word string) string {
	if _, err := netip.ParseAddr(word); err == nil {
		return word
	}
	if a.known(word) {
		return "name-" + strings.ToLower(a.hashed(word, 12))
	}
	if !strings.Contains(word, ".") {
		return word
	}
	parts := strings.Split(word, ".")
	for i, p := range parts {
		if a.known(p) {
			parts[i] = "name-" + strings.ToLower(a.hashed(p, 12))
		}
	}
	return strings.Join(parts, ".")
}

// known reports whether a word is a name, or one that was made of a name, as those of Pods and EndpointSlices are.
func (a *anonymizer) known(word string) bool {
	if a.names[word] {
		return true
	}
	for i := range len(word) {
		if word[i] == '-' && a.names[word[:i]] {
			return true
		}
	}
	return false
}

// address replaces an address, but neither a port behind it nor an address that every node has.
func (a *anonymizer) address(text string) string {
	bare := strings.TrimRight(text, ".")
	if len(bare) > 2 && strings.HasSuffix(bare, ":") && !strings.HasSuffix(bare, "::") {
		bare = bare[:len(bare)-1]
	}
	rest := text[len(bare):]
	addr, err := netip.ParseAddr(bare)
	if err != nil {
		at, err := netip.ParseAddrPort(bare)
		if err != nil {
			return text
		}
		i := strings.LastIndexByte(bare, ':')
		addr, rest = at.Addr(), bare[i:]+rest
	}
	if addr.IsLoopback() || addr.IsUnspecified() {
		return text
	}
	family := "ip4-"
	if addr.Is6() {
		family = "ip6-"
	}
	return family + strings.ToLower(a.hashed(addr.String(), 12)) + rest
}

// report replaces the names and addresses in the files of a bug report.
func (a *anonymizer) report(report []reportFile) {
	if host, err := os.Hostname(); err == nil {
		a.learn(host)
	}
	for _, f := range report {
		a.learnFrom(f.text)
	}
	for i := range report {
		report[i].text = a.apply(report[i].text)
	}
}
