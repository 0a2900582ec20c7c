/* A load generator that is not itself the limit.
 *
 * It knows nothing of the broker's protocols but how to count answers: lines (text) or frames
 * (WebSocket). What it sends is prepared by whoever starts it, in files:
 *
 *   load publish HOST PORT UNIT CONNECTIONS ROUNDS PER_ROUND GREETING ROUND
 *       Each connection sends GREETING (may be empty), then ROUNDS times the file ROUND, which holds
 *       PER_ROUND requests; the next round when all of the last one are answered.
 *       Prints {"answers": n, "errors": n, "seconds": s}.
 *
 *   load listen HOST PORT UNIT CONNECTIONS GREETINGS GREETING
 *       Each connection sends GREETING and waits for GREETINGS answers; then prints "ready" and counts
 *       whatever comes. For each line on standard input it prints
 *       {"frames": n, "bytes": n, "least": n, "open": n, "first": s, "last": s} (least: of the
 *       connection that got the fewest; first, last: seconds of the monotonic clock), starting over.
 *       Pings are answered. It ends with standard input.
 *
 *   load latency HOST PORT UNIT RATE COUNT GREETING GREETINGS PUBLISH_GREETING REQUEST
 *       One connection listens as above, another publishes REQUEST at RATE a second, COUNT times.
 *       Prints the nanoseconds from when each was sent to when it was delivered, one a line.
 *
 * PUBLISH_GREETING and GREETING of "publish" are answered once if they are not empty; a WebSocket
 * handshake (which begins with GET) is answered by a head that ends with an empty line, and counts as
 * no answer. Loopback only, so there is no error that is worth more than a word: it says it and exits.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PER_SOURCE_ADDRESS 5000 /* connections from one 127.0.0.x: ports must not run out */
#define HEAD_MAX 14

typedef struct {
    char *data;
    size_t size;
} Blob;

typedef struct {
    int fd;
    int is_handshaking;  /* the head of a handshake's answer is awaited */
    unsigned head_match; /* how much of \r\n\r\n was seen */
    size_t at;           /* how much of what is being sent has been */
    const Blob *sending;
    uint64_t answers;
    uint64_t errors;
    uint64_t counted_before;
    long rounds_left;
    long awaited;
    /* a frame that is not complete: its head so far, how much of its content is to come */
    unsigned char head[HEAD_MAX];
    unsigned head_size;
    uint64_t content_left;
    unsigned opcode;
    uint64_t content_at;
    unsigned char content[128]; /* the beginning: enough for a ping, and to tell an error */
} Connection;

static int frames_wanted;
static uint64_t bytes_total;

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(2);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static Blob read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    fseek(file, 0, SEEK_END);
    Blob blob = {NULL, (size_t)ftell(file)};
    rewind(file);
    blob.data = malloc(blob.size + 1);
    if (fread(blob.data, 1, blob.size, file) != blob.size) die(path);
    fclose(file);
    return blob;
}

static int connect_to(const char *host, int port, int number) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) die("socket");
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (strncmp(host, "127.", 4) == 0) {
        setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
        struct sockaddr_in source = {.sin_family = AF_INET};
        source.sin_addr.s_addr = htonl(0x7f000001u + (uint32_t)(number / PER_SOURCE_ADDRESS));
        if (bind(fd, (struct sockaddr *)&source, sizeof source) < 0) die("bind");
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) die(host);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) die("connect");
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    return fd;
}

/* --- sending ------------------------------------------------------------------------------------ */
/* Sends on; 1 when all of it is out. */
static int push(Connection *c) {
    while (c->sending && c->at < c->sending->size) {
        ssize_t n = send(c->fd, c->sending->data + c->at, c->sending->size - c->at, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN) return 0;
            die("send");
        }
        c->at += (size_t)n;
    }
    c->sending = NULL;
    return 1;
}

static int start_sending(Connection *c, const Blob *blob) {
    c->sending = blob;
    c->at = 0;
    if (blob->size > 4 && memcmp(blob->data, "GET ", 4) == 0) c->is_handshaking = 1;
    return push(c);
}

/* --- counting ----------------------------------------------------------------------------------- */
static void pong(Connection *c) {
    unsigned char frame[6 + 125] = {0x8a, (unsigned char)(0x80 | c->content_at)};
    memcpy(frame + 6, c->content, c->content_at);
    if (send(c->fd, frame, 6 + c->content_at, MSG_NOSIGNAL) < 0 && errno != EAGAIN) die("pong");
}

static void frame_ends(Connection *c) {
    if (c->opcode == 9) {
        pong(c);
        return;
    }
    if (c->opcode != 1) return;
    c->answers++;
    if (c->content_at > 10 && memcmp(c->content, "{\"type\":\"error", 14) == 0) c->errors++;
}

static size_t frame_head_size(const unsigned char *head) {
    unsigned size = head[1] & 0x7f;
    return size == 126 ? 4 : size == 127 ? 10 : 2;
}

static void count_frames(Connection *c, const unsigned char *data, size_t size) {
    const unsigned char *end = data + size;
    while (data < end) {
        if (c->content_left == 0) {
            c->head[c->head_size++] = *data++;
            if (c->head_size < 2 || c->head_size < frame_head_size(c->head)) continue;
            uint64_t length = c->head[1] & 0x7f;
            if (length >= 126) {
                length = 0;
                for (unsigned at = 2; at < c->head_size; at++) length = length << 8 | c->head[at];
            }
            c->opcode = c->head[0] & 0x0f;
            c->head_size = 0;
            c->content_at = 0;
            c->content_left = length;
            if (length == 0) frame_ends(c);
            continue;
        }
        uint64_t here = (uint64_t)(end - data);
        if (here > c->content_left) here = c->content_left;
        if (c->content_at < sizeof c->content) {
            uint64_t kept = sizeof c->content - c->content_at;
            memcpy(c->content + c->content_at, data, kept < here ? kept : here);
        }
        c->content_at += here;
        c->content_left -= here;
        data += here;
        if (c->content_left == 0) frame_ends(c);
    }
}

static void count_lines(Connection *c, const unsigned char *data, size_t size) {
    const unsigned char *end = data + size, *at = data;
    while ((at = memchr(at, '\n', (size_t)(end - at)))) c->answers++, at++;
    /* "ERR" has the only capital E that an answer to PUB can have. */
    for (at = data; (at = memchr(at, 'E', (size_t)(end - at))); at++) c->errors++;
}

static void count(Connection *c, const unsigned char *data, size_t size) {
    bytes_total += size;
    while (c->is_handshaking && size) {
        c->head_match = *data == "\r\n\r\n"[c->head_match] ? c->head_match + 1 : *data == '\r';
        data++, size--;
        if (c->head_match == 4) c->is_handshaking = 0;
    }
    if (!size) return;
    if (frames_wanted)
        count_frames(c, data, size);
    else
        count_lines(c, data, size);
}

/* Reads what is there; 0 when the connection has ended. */
static int pull(Connection *c) {
    static unsigned char buffer[1 << 20];
    for (;;) {
        ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
        if (n == 0) return 0;
        if (n < 0) return errno == EAGAIN;
        count(c, buffer, (size_t)n);
        if ((size_t)n < sizeof buffer) return 1;
    }
}

/* --- many connections ------------------------------------------------------------------------------ */
static void greet(Connection *c, const Blob *greeting, uint64_t answers) {
    if (!greeting->size) return;
    if (!start_sending(c, greeting)) die("a greeting that does not fit");
    while (c->is_handshaking || c->answers < answers) {
        struct pollfd wait = {.fd = c->fd, .events = POLLIN};
        if (poll(&wait, 1, 10000) <= 0) die("no answer to the greeting");
        if (!pull(c)) die("the broker closed the connection");
    }
    if (c->errors) die("the greeting was refused");
    c->answers = 0;
}

/* Read what has come: a broker closes connections that do not answer its pings. */
static void attend(int epoll) {
    struct epoll_event events[256];
    for (int ready; (ready = epoll_wait(epoll, events, 256, 0)) > 0;)
        for (int n = 0; n < ready; n++)
            if (!pull(events[n].data.ptr)) die("the broker closed the connection");
}

/* Each greets as soon as it is connected: a broker closes connections that stay silent. */
static Connection *open_all(const char *host, int port, int many, int *epoll, Blob *greeting,
                            uint64_t answers) {
    Connection *all = calloc((size_t)many, sizeof *all);
    *epoll = epoll_create1(0);
    if (!all || *epoll < 0) die("epoll");
    greeting->data[greeting->size] = 0;
    char *number = strstr(greeting->data, "####"), digits[12];
    for (int n = 0; n < many; n++) {
        if (number) {
            snprintf(digits, sizeof digits, "%04d", n % 10000);
            memcpy(number, digits, 4);
        }
        all[n].fd = connect_to(host, port, n);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[n]};
        if (epoll_ctl(*epoll, EPOLL_CTL_ADD, all[n].fd, &event) < 0) die("epoll_ctl");
        greet(&all[n], greeting, answers);
        if (n % 100 == 99) attend(*epoll);
    }
    return all;
}

static void want_writes(int epoll, Connection *c, int wanted) {
    struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event) < 0) die("epoll_ctl");
}

static int publish(char **argv) {
    const char *host = argv[0];
    int port = atoi(argv[1]), many = atoi(argv[3]), epoll;
    long rounds = atol(argv[4]), per_round = atol(argv[5]);
    Blob greeting = read_file(argv[6]), round = read_file(argv[7]);
    uint64_t greeted = greeting.size && memcmp(greeting.data, "GET ", 4) ? 1 : 0;
    Connection *all = open_all(host, port, many, &epoll, &greeting, greeted);
    double began = now();
    int busy = 0;
    for (int n = 0; n < many; n++) {
        all[n].rounds_left = rounds;
        if (rounds) {
            busy++, all[n].rounds_left--, all[n].awaited = per_round;
            if (!start_sending(&all[n], &round)) want_writes(epoll, &all[n], 1);
        }
    }
    while (busy) {
        struct epoll_event events[256];
        int ready = epoll_wait(epoll, events, 256, 30000);
        if (ready <= 0) die("no answer");
        for (int n = 0; n < ready; n++) {
            Connection *c = events[n].data.ptr;
            if (events[n].events & EPOLLOUT && push(c)) want_writes(epoll, c, 0);
            if (!(events[n].events & ~EPOLLOUT)) continue;
            uint64_t before = c->answers;
            if (!pull(c)) die("the broker closed the connection");
            c->awaited -= (long)(c->answers - before);
            if (c->awaited > 0 || c->sending) continue;
            if (c->rounds_left-- > 0) {
                c->awaited = per_round;
                if (!start_sending(c, &round)) want_writes(epoll, c, 1);
            } else {
                busy--;
            }
        }
    }
    double seconds = now() - began;
    uint64_t answers = 0, errors = 0;
    for (int n = 0; n < many; n++) answers += all[n].answers, errors += all[n].errors;
    printf("{\"answers\": %lu, \"errors\": %lu, \"seconds\": %.6f}\n", answers, errors, seconds);
    return 0;
}

static int listen_all(char **argv) {
    const char *host = argv[0];
    int port = atoi(argv[1]), many = atoi(argv[3]), epoll;
    uint64_t greetings = strtoull(argv[4], NULL, 10);
    Blob greeting = read_file(argv[5]);
    Connection *all = open_all(host, port, many, &epoll, &greeting, greetings);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, 0, &event) < 0) die("standard input");
    printf("ready\n");
    fflush(stdout);
    bytes_total = 0;
    uint64_t frames = 0;
    int open = many;
    double first = 0, last = 0;
    for (;;) {
        struct epoll_event events[1024];
        int ready = epoll_wait(epoll, events, 1024, -1);
        for (int n = 0; n < ready; n++) {
            Connection *c = events[n].data.ptr;
            if (!c) {
                char line[256];
                ssize_t size = read(0, line, sizeof line);
                if (size <= 0) return 0;
                uint64_t least = UINT64_MAX;
                for (int k = 0; k < many; k++) {
                    uint64_t got = all[k].answers - all[k].counted_before;
                    all[k].counted_before = all[k].answers;
                    if (got < least) least = got;
                }
                printf("{\"frames\": %lu, \"bytes\": %lu, \"least\": %lu, \"open\": %d, "
                       "\"first\": %.6f, \"last\": %.6f}\n",
                       frames, bytes_total, least, open, first, last);
                fflush(stdout);
                frames = bytes_total = 0;
                first = last = 0;
                continue;
            }
            uint64_t before = c->answers;
            int alive = pull(c);
            if (c->answers != before) {
                last = now();
                if (!first) first = last;
                frames += c->answers - before;
            }
            if (!alive) {
                epoll_ctl(epoll, EPOLL_CTL_DEL, c->fd, NULL);
                close(c->fd);
                open--;
            }
        }
    }
}

static int latency(char **argv) {
    const char *host = argv[0];
    int port = atoi(argv[1]);
    double rate = atof(argv[3]);
    long many = atol(argv[4]), sent = 0;
    Blob listening = read_file(argv[5]), greeting = read_file(argv[7]), request = read_file(argv[8]);
    Connection in = {.fd = connect_to(host, port, 0)}, out = {.fd = connect_to(host, port, 0)};
    greet(&in, &listening, strtoull(argv[6], NULL, 10));
    greet(&out, &greeting, greeting.size && memcmp(greeting.data, "GET ", 4) ? 1 : 0);
    double *sent_at = calloc((size_t)many, sizeof(double)), *took = calloc((size_t)many, sizeof(double));
    double next = now() + 0.01, give_up = 0;
    while (in.answers < (uint64_t)many) {
        double time = now();
        if (sent < many && time >= next) {
            sent_at[sent++] = time;
            if (!start_sending(&out, &request)) die("the broker does not read");
            next += 1 / rate;
            give_up = time + 10;
            continue;
        }
        if (sent == many && time > give_up) die("not everything was delivered");
        double left = sent < many ? next - time : 1;
        struct timespec wait = {(time_t)left, (long)((left - (time_t)left) * 1e9)};
        struct pollfd fds[2] = {{.fd = in.fd, .events = POLLIN}, {.fd = out.fd, .events = POLLIN}};
        if (ppoll(fds, 2, &wait, NULL) < 0) die("ppoll");
        if (fds[0].revents) {
            uint64_t before = in.answers;
            if (!pull(&in)) die("the broker closed the connection");
            time = now();
            for (; before < in.answers && before < (uint64_t)many; before++)
                took[before] = time - sent_at[before];
        }
        if (fds[1].revents && !pull(&out)) die("the broker closed the connection");
    }
    if (out.errors) die("a publish was refused");
    for (long n = 0; n < many; n++) printf("%.0f\n", took[n] * 1e9);
    return 0;
}

int main(int argc, char **argv) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    signal(SIGPIPE, SIG_IGN);
    const char *mode = argc > 4 ? argv[1] : "";
    if (argc > 4) frames_wanted = strcmp(argv[4], "frames") == 0;
    if (strcmp(mode, "publish") == 0 && argc == 10) return publish(argv + 2);
    if (strcmp(mode, "listen") == 0 && argc == 8) return listen_all(argv + 2);
    if (strcmp(mode, "latency") == 0 && argc == 11) return latency(argv + 2);
    fprintf(stderr, "load: see the head of load.c\n");
    return 2;
}
