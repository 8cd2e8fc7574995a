package bugreport

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
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
	// objects are known objects, as NAMESPACE/NAME. Names may be numbers, which only here are told apart from others.
	objects map[string]bool
	// listed are what the log may list as objects, while it is the log that is replaced: elsewhere, the same may be anything.
	listed map[string]bool
}

func newAnonymizer() *anonymizer {
	a := &anonymizer{key: make([]byte, 32), names: map[string]bool{}, objects: map[string]bool{}}
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
		if _, err := netip.ParseAddr(n); err != nil && !wellKnown[n] {
			a.names[n] = true
		}
	}
}

// learnObject adds the name of an object and that of its namespace.
func (a *anonymizer) learnObject(namespace, name string) {
	a.learn(namespace, name)
	a.objects[namespace+"/"+name] = true
}

var (
	// objectIn matches the namespace and name of an object, where a text says that it is one, by its kind or in the comment of a rule or an element.
	// Elsewhere, what looks like that may be anything, such as 1/465 in /proc/loadavg.
	objectIn = regexp.MustCompile(`(?:\b(?:Service|ServicePort|Endpoints|EndpointSlice|Pod) |\bcomment )"?([a-z0-9][a-z0-9-]*)/([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)`)
	// objectInLog matches them in the log, whose messages list Services without saying so, but no file, as those of manifests.
	objectInLog = regexp.MustCompile(`[\s"=(]([a-z0-9][a-z0-9-]*)/([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?:[\s":;,)]|$)`)
	manifest    = regexp.MustCompile(`\.(?:ya?ml|json)$`)
	// hostIn matches the host of a URL.
	hostIn = regexp.MustCompile(`://(?:[^/\s@"']+@)?([A-Za-z0-9.-]+)`)
	// podIn matches the name of a Pod, an EndpointSlice or a node where a text speaks of one.
	podIn = regexp.MustCompile(`\b(?:Pods?|[Nn]odes?|EndpointSlice)[ =]"?([a-z0-9][a-z0-9.-]*[a-z0-9])\b`)
	// number matches what is one, if it is not known to be a name there.
	number = regexp.MustCompile(`^(?:[0-9]+|0x[0-9a-f]+)$`)
)

// nameKeys are keys of answers and of the configuration whose values are names.
var nameKeys = map[string]bool{"namespace": true, "name": true, "node": true, "nodeName": true, "pod": true, "hostnameOverride": true}

// learnFrom adds the names in what JSON has.
func (a *anonymizer) learnFrom(answer any) {
	switch v := answer.(type) {
	case map[string]any:
		namespace, _ := v["namespace"].(string)
		name, _ := v["name"].(string)
		if namespace != "" && name != "" {
			a.learnObject(namespace, name)
		}
		for key, value := range v {
			if name, is := value.(string); is && nameKeys[key] {
				a.learn(name)
			}
			a.learnFrom(value)
		}
	case []any:
		for _, value := range v {
			a.learnFrom(value)
		}
	case string:
		a.learnFromText(v)
	}
}

// learnFromText adds the names in a text, such as that of a finding, the log or rules.
func (a *anonymizer) learnFromText(text string) {
	for _, m := range objectIn.FindAllStringSubmatch(text, -1) {
		a.learnObject(m[1], m[2])
	}
	for _, m := range hostIn.FindAllStringSubmatch(text, -1) {
		a.learn(m[1])
	}
	for _, m := range podIn.FindAllStringSubmatch(text, -1) {
		// Without a hyphen or a digit, it may be the next word of the sentence.
		if strings.ContainsAny(m[1], "-0123456789") && !number.MatchString(m[1]) {
			a.learn(m[1])
		}
	}
}

// listedIn returns what the log may list as objects.
func listedIn(log string) map[string]bool {
	out := map[string]bool{}
	for _, m := range objectInLog.FindAllStringSubmatch(log, -1) {
		if !number.MatchString(m[1]) && !number.MatchString(m[2]) && !manifest.MatchString(m[2]) {
			out[m[1]+"/"+m[2]] = true
		}
	}
	return out
}

// hashed is the hash of a text, of so many letters and digits.
func (a *anonymizer) hashed(text string, size int) string {
	h := hmac.New(sha256.New, a.key)
	h.Write([]byte(text))
	return base32.StdEncoding.EncodeToString(h.Sum(nil))[:size]
}

func (a *anonymizer) hashedName(name string) string {
	if wellKnown[name] {
		return name
	}
	return "name-" + strings.ToLower(a.hashed(name, 12))
}

var (
	// chains match the chains whose names are hashes of the names of Services, which could be found out by trial.
	chains = regexp.MustCompile(`\b(KUBE-[A-Z]+)-[A-Z2-7]{16}\b`)
	// addresses match what may be an address, with or without a port.
	addresses = regexp.MustCompile(`[0-9A-Fa-f]*[:.][0-9A-Fa-f:.]*`)
	// words match what may be the namespace and name of an object, or a name, or several with dots between them.
	words = regexp.MustCompile(`[a-z0-9][a-z0-9-]*/[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?`)
	// escapes match what stands for a character in a URL.
	escapes = regexp.MustCompile(`%[0-9A-Fa-f]{2}`)
	// literals match the strings of JSON, with the colon behind one that is a key.
	literals = regexp.MustCompile(`"(?:[^"\\]|\\.)*"(?: *:)?`)
)

// apply replaces the names and addresses in a text; addresses first, since a part of one may be a name as well.
func (a *anonymizer) apply(text string) string {
	text = chains.ReplaceAllStringFunc(text, func(chain string) string {
		i := strings.LastIndexByte(chain, '-')
		return chain[:i+1] + a.hashed(chain, 16)
	})
	inText := func(text string) string { return words.ReplaceAllStringFunc(text, a.words) }
	// In a URL, escapes are no part of the name behind them.
	return replace(text, escapes, func(escape string) (string, bool) { return escape, true }, func(text string) string {
		return replace(text, addresses, func(found string) (string, bool) { hashed := a.address(found); return hashed, hashed != found }, inText)
	})
}

// replace replaces what matches an expression and what is between that. Where match returns false, it is a part of what is between.
func replace(text string, what *regexp.Regexp, match func(string) (string, bool), between func(string) string) string {
	var out strings.Builder
	last := 0
	for _, at := range what.FindAllStringIndex(text, -1) {
		if put, is := match(text[at[0]:at[1]]); is {
			out.WriteString(between(text[last:at[0]]) + put)
			last = at[1]
		}
	}
	return out.String() + between(text[last:])
}

// applyJSON replaces the names and addresses in the strings of JSON, but not the keys that are those of fields.
func (a *anonymizer) applyJSON(text string) string {
	key := "" // of the value that follows
	return literals.ReplaceAllStringFunc(text, func(literal string) string {
		end := strings.LastIndexByte(literal, '"') + 1
		var value string
		if json.Unmarshal([]byte(literal[:end]), &value) != nil {
			return literal
		}
		named := nameKeys[key] && a.names[value]
		key = ""
		hashed := value
		switch {
		case end < len(literal) && !strings.ContainsAny(value, "/:."):
			key = value
		case named:
			hashed = a.hashedName(value)
		default:
			hashed = a.apply(value)
		}
		if hashed == value {
			return literal
		}
		quoted, err := json.Marshal(hashed)
		if err != nil {
			return literal
		}
		return string(quoted) + literal[end:]
	})
}

// words replaces the names in what matches the regular expression of that name.
func (a *anonymizer) words(text string) string {
	first, second, two := strings.Cut(text, "/")
	if !two {
		return a.word(text)
	}
	if a.objects[text] || a.listed[text] {
		return a.hashedName(first) + "/" + a.hashedName(second)
	}
	return a.word(first) + "/" + a.word(second)
}

// word replaces a name, or those of its parts between dots that are names.
func (a *anonymizer) word(word string) string {
	if a.known(word) {
		return a.hashedName(word)
	}
	if !strings.Contains(word, ".") {
		return word
	}
	parts := strings.Split(word, ".")
	for i, p := range parts {
		if a.known(p) {
			parts[i] = a.hashedName(p)
		}
	}
	return strings.Join(parts, ".")
}

// known reports whether a word is a name, or one that was made of a name, as those of Pods and EndpointSlices are.
func (a *anonymizer) known(word string) bool {
	if number.MatchString(word) {
		return false
	}
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

// address replaces an address, but neither a port behind it, nor what a colon separates from it, nor an address that every node has.
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
			before, after, more := strings.Cut(text, ":")
			if !more {
				return text
			}
			return a.address(before) + ":" + a.address(after)
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

// HashNames replaces the names and addresses in the files of a bug report by hashes. What it learns, it learns from what nodeproxy says and from
// comments of rules: what the system says of itself has no names.
func HashNames(report []File) { newAnonymizer().report(report) }

func (a *anonymizer) report(report []File) {
	if host, err := os.Hostname(); err == nil {
		a.learn(host)
	}
	isJSON := make([]bool, len(report))
	for i, f := range report {
		var answer any
		isJSON[i] = strings.HasSuffix(f.Name, ".json") && json.Unmarshal([]byte(f.Text), &answer) == nil
		switch {
		case isJSON[i]:
			a.learnFrom(answer)
		case f.Name != "system.txt" && f.Name != "version.txt":
			a.learnFromText(f.Text)
		}
	}
	for i, f := range report {
		if a.listed = nil; f.Name == "log.txt" {
			a.listed = listedIn(f.Text)
		}
		if isJSON[i] {
			report[i].Text = a.applyJSON(f.Text)
		} else {
			report[i].Text = a.apply(f.Text)
		}
	}
}
